"""`nystromformer attention-map`: the paper's figure for your own model and text, and the errors it rests on."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nystromformer.checks import parse_whole_numbers
from nystromformer.commands import Device, Dtype, choice, new_folder, seed_of, text_file, whole_number
from nystromformer.errors import user_input

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase


EXAMPLES_AT_ONCE = 16


def attention_map(
    model: Annotated[str, typer.Option(help="Folder or Hub id of an encoder of Transformers, with its tokenizer.")],
    text: Annotated[Path, text_file("UTF-8 text, cut at --max-length tokens.")],
    landmarks: Annotated[str, typer.Option(help="Numbers of landmarks to compare.")] = "16,64,256",
    layer: Annotated[str, typer.Option(help="Layers to draw, as 0,3; `all`; `auto`: first, middle, last.")] = "auto",
    head: Annotated[str, typer.Option(help="Heads to draw; `all`; `auto`: least, median and largest error.")] = "auto",
    attention: Annotated[str, choice("What to compare.", "nystrom", "nystrom-local")] = "nystrom",
    sentences: Annotated[bool, typer.Option("--sentences", help="Each line of the text is an example.")] = False,
    max_length: Annotated[int, whole_number("Most tokens of an example.", most=1_024)] = 512,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    seed: Annotated[int, seed_of("nothing: it is kept in the records, but nothing here is random")] = 0,
    out: Annotated[Path, new_folder("Folder for pictures, table and records.")] = Path("runs/attention-map"),
) -> None:
    """Draw exact and Nyström attention of a model side by side, with their errors by layer and head.

    Example: `nystromformer attention-map --model path/to/MiniLM --text article.txt --landmarks 16,64,256`
    """
    from nystromformer.bench.attention_study import AttentionStudy
    from nystromformer.bench.cases import DTYPES, check_device
    from nystromformer.records import new_job_folder
    from nystromformer.report.table import print_tables

    with user_input():
        numbers = sorted(parse_whole_numbers("--landmarks", landmarks, 1, 1_024))
    config = {
        "model": model,
        "text": str(text),
        "landmarks": numbers,
        "attention": attention,
        "sentences": sentences,
        "max_length": max_length,
        "dtype": dtype,
        "device": device,
    }
    with user_input():
        check_device(device)
        examples = read_examples(text, sentences)
        network, tokenizer = load(model)
        network = network.to(device=device, dtype=DTYPES[dtype])
        batches = tokenize(network, tokenizer, examples, max_length)
        study = AttentionStudy([(attention, number) for number in numbers])
        study.look_at(network, tokenizer, batches)
        drawn = chosen(layer, "--layer", study.layers, [0, study.layers // 2, study.layers - 1])
        heads = None if head == "auto" else chosen(head, "--head", study.heads, [])
        new_job_folder(out)

    study.write(out, config, seed, drawn, heads)
    print_tables([study.table()])
    typer.echo(f"Pictures, table and records: {out}")


def read_examples(path: Path, sentences: bool) -> list[str]:
    """The text as one example, or each of its lines as one; ValueError or OSError where there is none."""
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path}: must be UTF-8 text ({error.reason} at byte {error.start}).") from None
    if "\0" in content:
        raise ValueError(f"--text {path}: holds NUL at character {content.index(chr(0))}, which no text does.")
    examples = [line.strip() for line in (content.splitlines() if sentences else [content]) if line.strip()]
    if not examples:
        raise ValueError(f"--text {path}: holds no text.")
    return examples


def load(name: str) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    from transformers import AutoModel

    from nystromformer.integrations import register
    from nystromformer.models import NystromformerConfig
    from nystromformer.models.loading import (
        check_checkpoint,
        load_any_tokenizer,
        load_checkpoint,
        refuse_lacking,
        wrong_keys,
    )

    register()
    config = check_checkpoint(name)
    if getattr(config, "vocab_size", None) is None:
        raise ValueError(f"--model {name}: is of type {config.model_type!r}, which reads no text; give a text encoder.")
    if isinstance(config, NystromformerConfig):
        raise ValueError(
            f"--model {name}: is a Nyströmformer, which has no exact attention to compare with; make one with "
            f"`nystromformer convert {name} DST --to bert`."
        )
    tokenizer = load_any_tokenizer(name, "--model")
    network, info = load_checkpoint(AutoModel, name)
    refuse_lacking(name, network, {key for key in wrong_keys(info) if "pooler" not in key})
    return network.eval(), tokenizer


def tokenize(
    network: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", examples: list[str], max_length: int
) -> list["BatchEncoding"]:
    """Batches of examples of similar length, the longest first."""
    from nystromformer.models.encoder import LONGEST

    places = getattr(network.config, "max_position_embeddings", None) or LONGEST
    limit = min(LONGEST, places, tokenizer.model_max_length)
    if not 1 <= max_length <= limit:
        raise ValueError(f"--max-length {max_length}: must be between 1 and {limit} for this model.")
    lengths = [len(ids) for ids in tokenizer(examples, truncation=True, max_length=max_length)["input_ids"]]
    order = sorted(range(len(examples)), key=lambda index: -lengths[index])
    return [
        tokenizer(
            [examples[index] for index in order[first : first + EXAMPLES_AT_ONCE]],
            truncation=True,
            max_length=max_length,
            padding=True,
            return_tensors="pt",
        ).to(network.device)
        for first in range(0, len(order), EXAMPLES_AT_ONCE)
    ]


def chosen(text: str, option: str, number: int, automatic: "Sequence[int]") -> list[int]:
    """The indices that an option names, of `number` there are."""
    if text in ("auto", "all"):
        return sorted(set(automatic)) if text == "auto" else list(range(number))
    return sorted(parse_whole_numbers(option, text, 0, number - 1))
