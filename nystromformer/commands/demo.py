"""`nystromformer demo`: exact and Nyström attention side by side, from nothing to a report."""

from pathlib import Path
from typing import Annotated

import typer

from nystromformer.commands import TrainingDtype, choice, new_folder, seed_of, whole_number
from nystromformer.errors import user_input


def demo(
    out: Annotated[Path, new_folder("Folder for data, runs and report; must be new or empty.")] = Path("runs/demo"),
    steps: Annotated[int, whole_number("Training steps of each model.")] = 300,
    examples: Annotated[
        int, whole_number("Training examples; an eighth as many are for the test.", most=10_000_000)
    ] = 8_000,
    lengths: Annotated[str, typer.Option(help="Sequence lengths of the efficiency table.")] = "512,2048,4096",
    seed: Annotated[int, seed_of("data, weights and inputs")] = 0,
    device: Annotated[str, choice("Where to run.", "cpu", "cuda")] = "cpu",
    dtype: TrainingDtype = "float32",
) -> None:
    """Compare exact and Nyström attention for yourself: three to five minutes on two cores, without a network.

    Makes a small ListOps set, trains one model with each attention, measures time and memory beside other packages'
    Nyström attention, draws attention maps of the trained models, and puts everything on one page, `report.html`.

    Example: `nystromformer demo --out runs/demo`

    Shorter: `nystromformer demo --steps 20 --examples 400 --lengths 256,512 --out runs/short`
    """
    given = dict(locals())
    from nystromformer.demo import DemoOptions, run_demo

    with user_input():
        options = DemoOptions(**given)
    run_demo(options, say=typer.echo)
