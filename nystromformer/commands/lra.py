"""`nystromformer lra`: Long Range Arena, one task or all of them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from nystromformer.commands import (
    LONGEST,
    LraPreset,
    Packed,
    Seeds,
    choice,
    new_folder,
    number,
    training_command,
    whole_number,
)
from nystromformer.errors import user_input
from nystromformer.training import DTYPES

LEGACY = "As the released code does"
"""The part of the help with the switches for it."""


def switch(name: str, help: str) -> object:
    return typer.Option(f"--{name}", help=help, rich_help_panel=LEGACY)


@training_command
def lra(
    task: Annotated[str, typer.Argument(help="listops, text, retrieval, image, pathfinder, several of them, or all.")],
    attention: Annotated[str, typer.Option(help="Attentions by name, or `all`.")] = "",
    preset: LraPreset = "paper",
    data: Annotated[
        str, typer.Option(help="Folder of the data or its Hub id; for several tasks, a folder of such folders.")
    ] = "",
    out: Annotated[Path, new_folder("Folder for records and checkpoints.")] = Path("runs/lra"),
    seeds: Seeds = "",
    positions: Annotated[
        str | None, choice("Learned, as in the paper, or rotary. [default: learned]", "learned", "rotary")
    ] = None,
    conv_kernel_size: Annotated[
        int | None, whole_number("Of the skip convolution, odd. [default: the paper's, 35]", most=LONGEST)
    ] = None,
    dropout: Annotated[
        float | None, number("Of embeddings and sublayers. [default: the preset's, mostly 0.1]", 0, 0.99)
    ] = None,
    embedding_start: Annotated[
        str | None,
        choice("Random, or with near gray levels and pixels alike. [default: the preset's]", "random", "picture"),
    ] = None,
    normalize_pooled: Annotated[
        bool | None,
        typer.Option(help="Normalize means over tokens over the batch. [default: the preset's]", show_default=False),
    ] = None,
    self_pretrain: Annotated[
        int | None, whole_number("Before training, tell masked tokens of the training inputs for so many steps.", 0)
    ] = None,
    from_run: Annotated[
        str, typer.Option("--from", help="Start from the self-pretraining of this run, as with other seeds.")
    ] = "",
    after: Annotated[
        str, typer.Option(help="Start from the trained model of this run, as after an easier set of the same task.")
    ] = "",
    packed: Packed = None,
    attention_dropout: Annotated[float | None, number("Of the attention matrix, in `standard`.", 0, 0.99)] = None,
    dtype: Annotated[str | None, choice("Precision of training. [default: the preset's]", *DTYPES)] = None,
    legacy: Annotated[bool, switch("legacy", "All of the following.")] = False,
    legacy_padding_id: Annotated[bool, switch("legacy-padding-id", "Token 0 is padding; black pixels vanish.")] = False,
    legacy_pooling: Annotated[bool, switch("legacy-pooling", "The mean divides by the padded length.")] = False,
    legacy_text_length: Annotated[bool, switch("legacy-text-length", "Text is cut at 1,000 bytes.")] = False,
    legacy_dev_is_test: Annotated[bool, switch("legacy-dev-is-test", "Text is developed on its test part.")] = False,
    legacy_no_seed: Annotated[bool, switch("legacy-no-seed", "Another seed in each run.")] = False,
    legacy_one_cycle: Annotated[bool, switch("legacy-one-cycle", "A one-cycle schedule that moves β₁, too.")] = False,
    legacy_drop_last: Annotated[bool, switch("legacy-drop-last", "Evaluate without the last, smaller batch.")] = False,
    **common: Any,
) -> None:
    """Train and test on Long Range Arena, and put the results beside the paper's.

    Example: `nystromformer lra listops --attention nystrom-64 --preset mini --out runs/listops`

    After masked pixels of its own: `nystromformer lra image --self-pretrain 1000 --preset hour --out runs/image`

    All tasks and attentions: `nystromformer lra all --preset mini --out runs/lra`
    """
    given = dict(locals())
    from nystromformer.training.lra import Legacy, LraSweep
    from nystromformer.training.sweep import run_sweep

    given |= given.pop("common")
    switches = {name.removeprefix("legacy_"): given.pop(name) or legacy for name in [*given] if "legacy_" in name}
    with user_input():
        sweep = LraSweep.given(**given | {"legacy": Legacy(**switches)})
    run_sweep(sweep, say=typer.echo)
