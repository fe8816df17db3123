"""`nystromformer lra`: Long Range Arena, one task or all of them."""

from pathlib import Path
from typing import Annotated

import typer

from nystromformer.errors import user_input

LEGACY = "As the released code does"
"""The part of the help with the switches for it."""


def lra(
    task: Annotated[str, typer.Argument(help="listops, text, retrieval, image, pathfinder, several of them, or all.")],
    attention: Annotated[str, typer.Option(help="Attentions by name, or `all`.")] = "",
    preset: Annotated[str, typer.Option(help="paper, mini (minutes on two cores) or smoke (seconds).")] = "paper",
    data: Annotated[
        str, typer.Option(help="Folder of the data or its Hub id; for several tasks, a folder of such folders.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for records and checkpoints.")] = Path("runs/lra"),
    seed: Annotated[int, typer.Option(help="Seed of weights, dropout and the order of examples.")] = 0,
    seeds: Annotated[str, typer.Option(help="Several seeds, as 1,2,3: mean and deviation.")] = "",
    steps: Annotated[int | None, typer.Option(help="Training steps; warm-up shrinks in proportion.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples of a step, over all processes.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Cut longer inputs here.")] = None,
    attention_dropout: Annotated[float | None, typer.Option(help="Of the attention matrix, in `standard`.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a run in this folder stopped.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; by default the preset's.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value for any field of TrainingArguments; may be repeated.")
    ] = None,
    legacy: Annotated[bool, typer.Option("--legacy", help="All of the following.", rich_help_panel=LEGACY)] = False,
    legacy_padding_id: Annotated[
        bool,
        typer.Option(
            "--legacy-padding-id", help="Token value 0 is padding; black pixels vanish.", rich_help_panel=LEGACY
        ),
    ] = False,
    legacy_pooling: Annotated[
        bool, typer.Option("--legacy-pooling", help="The mean divides by the padded length.", rich_help_panel=LEGACY)
    ] = False,
    legacy_text_length: Annotated[
        bool, typer.Option("--legacy-text-length", help="Text is cut at 1,000 bytes.", rich_help_panel=LEGACY)
    ] = False,
    legacy_dev_is_test: Annotated[
        bool, typer.Option("--legacy-dev-is-test", help="Text is developed on its test part.", rich_help_panel=LEGACY)
    ] = False,
    legacy_no_seed: Annotated[
        bool, typer.Option("--legacy-no-seed", help="Another seed in each run.", rich_help_panel=LEGACY)
    ] = False,
    legacy_one_cycle: Annotated[
        bool,
        typer.Option("--legacy-one-cycle", help="A one-cycle schedule that moves β₁, too.", rich_help_panel=LEGACY),
    ] = False,
    legacy_drop_last: Annotated[
        bool,
        typer.Option("--legacy-drop-last", help="Evaluate without the last, smaller batch.", rich_help_panel=LEGACY),
    ] = False,
) -> None:
    """Train and test on Long Range Arena, and put the results beside the paper's.

    Example: `nystromformer lra listops --attention nystrom-64 --preset mini --out runs/listops`

    All tasks and attentions: `nystromformer lra all --preset mini --out runs/lra`
    """
    from nystromformer.training.lra import Legacy
    from nystromformer.training.lra_sweep import LraOptions, run_grid

    switches = {
        "padding_id": legacy_padding_id,
        "pooling": legacy_pooling,
        "text_length": legacy_text_length,
        "dev_is_test": legacy_dev_is_test,
        "no_seed": legacy_no_seed,
        "one_cycle": legacy_one_cycle,
        "drop_last": legacy_drop_last,
    }
    with user_input():
        options = LraOptions(
            tasks=task,
            attentions=attention,
            preset=preset,
            data=data,
            out=out,
            seeds=seeds or str(seed),
            steps=steps,
            batch_size=batch_size,
            max_length=max_length,
            attention_dropout=attention_dropout,
            resume=resume,
            device=device,
            dtype=dtype,
            settings=tuple(settings or ()),
            legacy=Legacy(**{name: value or legacy for name, value in switches.items()}),
        )
    run_grid(options, say=typer.echo)
