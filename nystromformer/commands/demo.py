"""`nystromformer demo`: what linear attention is for, measured here, from nothing to a page."""

from pathlib import Path
from typing import Annotated

import typer

from nystromformer.commands import LONGEST, new_folder, seed_of, whole_number
from nystromformer.errors import user_input


def demo(
    out: Annotated[Path, new_folder("Folder for records and the page; must be new or empty.")] = Path("runs/demo"),
    model: Annotated[
        Path | None, typer.Option(help="Folder of a BERT-like sentence encoder. [default: the installed MiniLM]")
    ] = None,
    tokens: Annotated[int, whole_number("Tokens of the long document.", least=2, most=LONGEST)] = 8_192,
    lengths: Annotated[str, typer.Option(help="Sequence lengths at which one call is measured.")] = (
        "128,256,512,1024,2048,4096,8192,16384"
    ),
    tiles: Annotated[int, whole_number("Tiles of a slide to train on.", least=500, most=100_000)] = 8_192,
    steps: Annotated[int, whole_number("Training steps of Nyström attention.")] = 120,
    seed: Annotated[int, seed_of("slides, weights and inputs")] = 0,
) -> None:
    """See for yourself what linear attention is for: about four minutes on two cores, without a network.

    A real model answers questions with its attention replaced, one call is measured from short to long input beside
    other packages, a classifier of slides is trained on thousands of tiles, and attention maps of real heads are
    drawn. A short table says what was gained; everything is on one page, `report.html`.

    Example: `nystromformer demo --out runs/demo`

    Shorter: `nystromformer demo --tokens 1024 --lengths 256,1024 --tiles 1000 --steps 10 --out runs/short`
    """
    given = dict(locals())
    from nystromformer.demo.run import DemoOptions, run_demo

    with user_input():
        options = DemoOptions(**given)
    run_demo(options, say=typer.echo)
