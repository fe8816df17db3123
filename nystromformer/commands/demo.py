"""`nystromformer demo`: exact and Nyström attention side by side, from nothing to a report."""

from pathlib import Path
from typing import Annotated

import typer

from nystromformer.errors import user_input


def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, runs and report; must be new or empty.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int, typer.Option(help="Training steps of each model.")] = 300,
    examples: Annotated[int, typer.Option(help="Training examples; an eighth as many are for the test.")] = 8_000,
    lengths: Annotated[str, typer.Option(help="Sequence lengths of the efficiency table.")] = "512,2048,4096",
    seed: Annotated[int, typer.Option(help="Seed of data, weights and inputs.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16 (on a GPU).")] = "float32",
) -> None:
    """Compare exact and Nyström attention for yourself: three to five minutes on two cores, without a network.

    Makes a small ListOps set, trains one model with each attention, measures time and memory beside other packages'
    Nyström attention, draws attention maps of the trained models, and puts everything on one page, `report.html`.

    Example: `nystromformer demo --out runs/demo`

    Shorter: `nystromformer demo --steps 20 --examples 400 --lengths 256,512 --out runs/short`
    """
    from nystromformer.demo import DemoOptions, run_demo

    with user_input():
        options = DemoOptions(
            out=out, steps=steps, examples=examples, lengths=lengths, seed=seed, device=device, dtype=dtype
        )
    run_demo(options, say=typer.echo)
