"""`nystromformer convert`: weights of BERT-like models for a Nyströmformer, and back."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nystromformer.checks import check_new_folder
from nystromformer.commands import LONGEST, choice, seed_of, whole_number
from nystromformer.errors import UserError, user_input

if TYPE_CHECKING:  # these take seconds to import, and `nystromformer --help` should not
    from transformers import PreTrainedModel

    from nystromformer.models.conversion import Conversion, Row


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder or Hub id of a model with safetensors weights.")],
    out: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; must not exist yet.")],
    to: Annotated[str, choice("bert is the way back.", "nystromformer", "bert")] = "nystromformer",
    max_length: Annotated[
        int | None,
        whole_number("Longest input; the learned positions are tiled. [default: as SRC]", most=LONGEST),
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help="Such as nystrom-64 or standard. [default: nystrom-64, or as SRC]")
    ] = None,
    conv_kernel_size: Annotated[
        int | None,
        whole_number("Of the skip convolution, odd; 0 for none. [default: 33, or as SRC]", least=0, most=LONGEST),
    ] = None,
    dtype: Annotated[
        str | None,
        choice("Precision of the weights. [default: as SRC]", "float32", "float16", "bfloat16", "float64"),
    ] = None,
    seed: Annotated[int, seed_of("weights that can't be taken over")] = 0,
) -> None:
    """Convert a BERT, RoBERTa or MiniLM checkpoint to a Nyströmformer ("from standard" in the paper).

    Skip convolutions start at zero, so the result starts with the source's behavior; with at most as many tokens as
    landmarks it computes the same. Tokenizer files come along.

    Example: `nystromformer convert google-bert/bert-base-uncased runs/long-bert --max-length 4096`
    """
    changes: dict[str, Any] = {"max_length": max_length}
    if attention is not None:
        changes["attention"] = attention
    if conv_kernel_size is not None:
        changes["conv_kernel_size"] = conv_kernel_size or None
    with user_input():
        check_arguments(out, to, attention, conv_kernel_size)
        import torch

        from nystromformer.models.conversion import Conversion, largest_difference, load_source
        from nystromformer.models.model import quiet_transformers

        torch.manual_seed(seed)
        with quiet_transformers():
            model, surplus = load_source(source)
        conversion = converted(model, to, changes)
    difference = largest_difference(model, conversion.model)
    if dtype is not None:
        conversion.model.to(getattr(torch, dtype))
    with user_input(), quiet_transformers():
        tokenizer = write(conversion.model, source, out)
    show(Conversion(conversion.model, conversion.rows + surplus), difference, tokenizer, out)


def check_arguments(out: Path, to: str, attention: str | None, conv_kernel_size: int | None) -> None:
    check_new_folder("DST", out)
    if to == "bert" and (attention is not None or conv_kernel_size is not None):
        raise UserError(
            "--to bert: BERT has standard attention and no convolution; drop --attention/--conv-kernel-size."
        )
    if out.exists():
        raise UserError(f"{out} exists already: give another DST, or remove it first.")


def converted(model: "PreTrainedModel", to: str, changes: dict[str, Any]) -> "Conversion":
    from nystromformer.models import NystromformerPreTrainedModel
    from nystromformer.models.conversion import convert_model, convert_own, convert_to_bert

    is_own = isinstance(model, NystromformerPreTrainedModel)
    if to == "bert":
        if not is_own:
            raise UserError(f"SRC is of type {model.config.model_type!r}: --to bert needs a Nyströmformer.")
        return convert_to_bert(model, **changes)
    return convert_own(model, **changes) if is_own else convert_model(model, **changes)


def write(model: "PreTrainedModel", source: str, out: Path) -> str:
    """Write model and tokenizer: DST is whole or absent. Returns a line about both."""
    from nystromformer.files import whole_folder

    with whole_folder(out) as folder:
        model.save_pretrained(folder)
        return copy_tokenizer(source, folder, model.config.max_position_embeddings)


def copy_tokenizer(source: str, folder: Path, max_length: int) -> str:
    from nystromformer.models.loading import has_tokenizer, load_any_tokenizer

    if not has_tokenizer(source):
        return "No tokenizer was copied: SRC has none."
    try:
        tokenizer = load_any_tokenizer(source, "SRC")
    except ValueError as error:
        return f"No tokenizer was copied: {error}"
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(folder)
    return f"The tokenizer came along; it cuts at {max_length} tokens."


def show(conversion: "Conversion", difference: float | None, tokenizer: str, out: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from nystromformer.models.conversion import grouped

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("weight", overflow="fold")
    table.add_column("tensors", justify="right", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    for row in grouped(conversion.rows):
        table.add_row(row.status, names_and_note(row), str(row.count), "×".join(map(str, row.shape)))
    console = Console()
    console.print(table)
    counts = {status: sum(row.status == status for row in conversion.rows) for status in ("mapped", "left", "new")}
    console.print(f"{counts['mapped']} weights mapped, {counts['left']} left behind, {counts['new']} new.")
    if difference is not None:
        console.print(f"Largest difference of the hidden states on a short random input: {difference:.1e}.")
    console.print(tokenizer)
    console.print(f"Written: {out} ({type(conversion.model).__name__})", soft_wrap=True)


def names_and_note(row: "Row") -> str:
    lines = [row.source or row.target]
    if row.source and row.target and without_prefix(row.source) != without_prefix(row.target):
        lines.append(f"→ {row.target}")
    return "\n".join(lines + [f"({row.note})"] * bool(row.note))


def without_prefix(name: str) -> str:
    """The name within the encoder, which every family has under a prefix of its own."""
    return name[name.index("encoder.layer.") :] if "encoder.layer." in name else name.split("embeddings.", 1)[-1]
