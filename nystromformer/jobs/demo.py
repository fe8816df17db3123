"""`nystromformer demo`: exact and Nyström attention side by side."""

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the records.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of the input.")] = 0,
) -> None:
    """Compare exact and Nyström attention in time, memory and error.

    Example: `nystromformer demo --out runs/demo`
    """
    raise NotImplementedError
