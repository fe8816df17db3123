"""`nystromformer lra-data`: make or fetch the data of a Long Range Arena task."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nystromformer.commands import LONGEST, LraPreset, new_folder, seed_of, whole_number
from nystromformer.errors import UserError, user_input


def lra_data(
    task: Annotated[str, typer.Argument(help="listops or pathfinder (made here), text or image (from the Hub).")],
    out: Annotated[Path | None, new_folder("Folder to write; must not exist yet.")] = None,
    preset: LraPreset = "paper",
    train: Annotated[int | None, whole_number("ListOps: training examples.")] = None,
    dev: Annotated[int | None, whole_number("ListOps: development examples.")] = None,
    test: Annotated[int | None, whole_number("ListOps: test examples.")] = None,
    min_tokens: Annotated[
        int | None, whole_number("ListOps: expressions have more tokens than this.", least=0, most=LONGEST)
    ] = None,
    max_tokens: Annotated[
        int | None, whole_number("ListOps: expressions have fewer tokens than this.", most=LONGEST)
    ] = None,
    count: Annotated[int | None, whole_number("Pathfinder: pictures, of which 80 % are for training.")] = None,
    contour_length: Annotated[
        int | None, whole_number("Pathfinder: paddles of a long contour; fewer are easier.", most=1_000)
    ] = None,
    preview: Annotated[Path | None, typer.Option(help="Pathfinder: a PNG of some pictures to look at.")] = None,
    workers: Annotated[int | None, whole_number("Processes; all cores by default.", most=1_024)] = None,
    seed: Annotated[int, seed_of("the data")] = 0,
) -> None:
    """Make the data of ListOps or Pathfinder, or fetch that of Text or Image from the Hub.

    Example: `nystromformer lra-data listops --out data/listops`

    Look at some pictures: `nystromformer lra-data pathfinder --preview pictures.png`
    """
    from dataclasses import replace

    from nystromformer.checks import check_choice
    from nystromformer.data.lra import TASKS, fetch, pathfinder
    from nystromformer.training.lra import generate
    from nystromformer.training.shared.recipes import LRA_RECIPES

    given = {
        "listops": {"train": train, "dev": dev, "test": test, "min_tokens": min_tokens, "max_tokens": max_tokens},
        "pathfinder": {"count": count, "contour_length": contour_length},
    }
    with user_input():
        check_choice("TASK", task, TASKS)
        for name, options in given.items():
            for option, value in options.items():
                if value is not None and name != task:
                    raise UserError(f"--{option.replace('_', '-')}: belongs to {name}, not to {task}; leave it out.")
        if preview is not None and task != "pathfinder":
            raise UserError(f"--preview: belongs to pathfinder, not to {task}; leave it out.")
        if out is None and preview is None:
            raise UserError("--out is missing: give the folder to write.")
        data: Any = LRA_RECIPES[preset][task].data
        if data is not None:
            changes = {option: value for option, value in given[task].items() if value is not None}
            data = replace(data, **changes, seed=seed)
        if preview is not None:
            pathfinder.preview(preview, data)
            typer.echo(f"{preview}: connected on the left, not connected on the right")
        if out is None:
            return
        if data is None:
            fetch(task, out)
        else:
            generate(task, out, data, workers)
    typer.echo(f"{task}: {out}")
