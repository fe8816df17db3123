"""`nystromformer attention-map`: the paper's figure for your own model and text, and the errors behind it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nystromformer.errors import UserError, user_input

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase


EXAMPLES_AT_ONCE = 16


def attention_map(
    model: Annotated[str, typer.Option(help="Folder or Hub id of an encoder of Transformers, with its tokenizer.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text, cut at --max-length tokens.")],
    landmarks: Annotated[str, typer.Option(help="Numbers of landmarks to compare.")] = "16,64,256",
    layer: Annotated[str, typer.Option(help="Layers to draw, as 0,3; `all`; `auto`: first, middle, last.")] = "auto",
    head: Annotated[str, typer.Option(help="Heads to draw; `all`; `auto`: least, median and largest error.")] = "auto",
    attention: Annotated[str, typer.Option(help="nystrom or nystrom-local.")] = "nystrom",
    sentences: Annotated[bool, typer.Option("--sentences", help="Each line of the text is an example.")] = False,
    max_length: Annotated[int, typer.Option(help="Most tokens of an example, up to 1024.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")] = "cpu",
    seed: Annotated[int, typer.Option(help="Kept in the records; nothing here is random.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for pictures, table and records.")] = Path("runs/attention-map"),
) -> None:
    """Draw exact and Nyström attention of a model side by side, with their errors by layer and head.

    Example: `nystromformer attention-map --model path/to/MiniLM --text article.txt --landmarks 16,64,256`
    """
    from nystromformer.bench.attention_study import AttentionStudy
    from nystromformer.bench.cases import DTYPES, check_device
    from nystromformer.checks import check_choice
    from nystromformer.integrations.attention_interface import OPERATIONS
    from nystromformer.records import new_job_folder

    config = {
        "model": model,
        "text": str(text),
        "landmarks": whole_numbers(landmarks, "--landmarks", least=1),
        "attention": attention,
        "sentences": sentences,
        "max_length": max_length,
        "dtype": dtype,
        "device": device,
    }
    with user_input():
        check_choice("attention", attention, OPERATIONS)
        check_choice("dtype", dtype, DTYPES)
        check_device(device)
        examples = read_examples(text, sentences)
        network, tokenizer = load(model)
        network = network.to(device=device, dtype=DTYPES[dtype])
        batches = tokenize(network, tokenizer, examples, max_length)
        study = AttentionStudy(OPERATIONS[attention], attention, config["landmarks"])
        study.look_at(network, tokenizer, batches)
        drawn = chosen(layer, "--layer", study.layers, [0, study.layers // 2, study.layers - 1])
        heads = None if head == "auto" else chosen(head, "--head", study.heads, [])
        new_job_folder(out)

    study.write(out, config, seed, drawn, heads)
    study.print()
    typer.echo(f"Pictures, table and records: {out}")


def read_examples(path: Path, sentences: bool) -> list[str]:
    """The text as one example, or each of its lines as one; ValueError or OSError where there is none."""
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path}: must be UTF-8 text ({error.reason} at byte {error.start}).") from None
    examples = [line.strip() for line in (content.splitlines() if sentences else [content]) if line.strip()]
    if not examples:
        raise ValueError(f"--text {path}: holds no text.")
    return examples


def load(name: str) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    from transformers import AutoModel, AutoTokenizer

    from nystromformer.integrations import register
    from nystromformer.models import NystromformerConfig

    register()
    try:
        network, tokenizer = AutoModel.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"--model {name}: {str(error).splitlines()[0]}") from error
    if isinstance(network.config, NystromformerConfig):
        raise UserError(
            f"--model {name}: is a Nyströmformer, which has no exact attention to compare with; make one with "
            f"`nystromformer convert {name} DST --to bert`."
        )
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


def whole_numbers(text: str, option: str, least: int = 0) -> list[int]:
    """Numbers such as "16,64", in order and once each; UserError for others.

    >>> whole_numbers("64, 16,16", "--landmarks")
    [16, 64]
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items or not all(item.isdecimal() and int(item) >= least for item in items):
        raise UserError(f"{option} {text!r}: must be whole numbers of at least {least}, separated by commas.")
    return sorted({int(item) for item in items})


def chosen(text: str, option: str, number: int, automatic: "Sequence[int]") -> list[int]:
    """The indices that an option names, of `number` there are."""
    if text in ("auto", "all"):
        return sorted(set(automatic)) if text == "auto" else list(range(number))
    indices = whole_numbers(text, option)
    if indices[-1] >= number:
        raise UserError(f"{option} {text}: must lie between 0 and {number - 1} for this model.")
    return indices
