"""A table of bad inputs for every command, made from the options that each declares and the files that it reads.

Numbers, choices and paths come from the declarations themselves: a new option is covered without being listed. Options
of text have their bad values in `TEXTS`; one that is not there fails a test, so that none is forgotten.
"""

import inspect
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import transformers
from corpora import texts, write_vocabulary
from glue_files import write_official
from report_runs import write_lra
from safetensors.torch import load_file, save_file
from small_bert import write_bert
from typer.models import ArgumentInfo

from nystromformer.cli import COMMANDS as PANELS
from nystromformer.commands import Choice, Range
from nystromformer.data.lra.listops import ListOpsOptions, generate

COMMANDS = {job.__name__.replace("_", "-"): job for jobs in PANELS.values() for job in jobs}

TINY = ["--preset", "smoke", "--device", "cpu"]
VALID = {
    "demo": ["--tokens", "64", "--lengths", "64", "--tiles", "500", "--steps", "1", "--out", "out"],
    "bench": ["--lengths", "64", "--attention", "standard", "--heads", "1", "--budget", "0.05", "--out", "out"],
    "attention-map": ["--model", "bert", "--text", "text.txt", "--landmarks", "4", "--max-length", "32",
                      "--out", "out"],
    "report": ["runs", "--out", "out"],
    "lra": ["listops", "--data", "listops", *TINY, "--out", "out"],
    "lra-data": ["listops", "--preset", "smoke", "--out", "out"],
    "pretrain": ["--corpus", "corpus.txt", "--tokenizer", "vocab.txt", *TINY, "--workers", "1",
                 "--out", "out", "--cache", "cache"],
    "finetune": ["sst2", "--model", "bert", "--data", "glue", *TINY, "--out", "out"],
    "convert": ["bert", "out"],
    "distill": ["--model", "bert", "--corpus", "corpus.txt", "--attention", "nystrom-8", *TINY,
                "--held-out-share", "0.3", "--out", "out"],
}  # fmt: skip
"""A command of each kind that would succeed in the folder that `write_inputs` fills."""

OWN_TABLE = ["custom", "--model", "bert", "--data", "own.csv", "--text-column", "text", *TINY, "--out", "out"]
"""A table of the user's own, which alone has columns to be named."""
COLUMNS = ("--text-column", "--pair-column", "--label-column")

PLACES = ["missing", "text.txt/below", "/dev/null", "empty", "/dev/null/below"]
"""Where there is no model, data set or run."""
ATTENTIONS = ["nystrm", "nystrom-0", "linformer-0", "longformer-4", "standard,,linear", "nystrom--1", "nystrom-x",
              "nystrom-9999999999999999999999", "standard-3", "nystrom-" + "9" * 5000]  # fmt: skip
LISTS = ["", "x", "1,,2", "-1", "1.5", "nan", "1;2", "9" * 6000]
"""No list of numbers."""
SETTINGS = ["learning_rat=1", "learning_rate", "learning_rate=fast", "learning_rate=nan", "seed=1", "adam_beta1=2",
            "report_to=wandb", "dataloader_num_workers=-1", "gradient_accumulation_steps=0", "push_to_hub=true",
            "metric_for_best_model=nope", "torch_compile_backend=nope", "label_names=zz", "eval_steps=0",
            "optim=nope", "lr_scheduler_kwargs={", "save_steps=-1", "max_grad_norm=inf"]  # fmt: skip
TEXTS: dict[str, list[str]] = {
    "task": ["", "x", "listops,,text", "all,x", "sst3"],
    "attention": ATTENTIONS,
    "seeds": [*LISTS[1:], "4294967296"],
    "lengths": [*LISTS, "0", "2097152"],
    "landmarks": [*LISTS, "0", "100000000"],
    "layer": [*LISTS, "99"],
    "head": [*LISTS, "99"],
    "device": ["toaster", "meta", "cuda:99", ""],
    "model": PLACES,
    "source": PLACES,
    "data": PLACES,
    "corpus": PLACES,
    "judge": PLACES,
    "from_run": PLACES,
    "after": PLACES,
    "stages": ["", "layer", "layers,,model", "all"],
    "layers": [*LISTS[1:], "99"],
    "budget": ["0.1", "error", "error=", "error=0", "speed=-1", "speed=nan", "time=2", "error=" + "9" * 6000],
    "tokenizer": PLACES,
    "settings": SETTINGS,
    "text_column": ["no such column"],
    "pair_column": ["no such column"],
    "label_column": ["no such column"],
}
"""Bad values of the options that take text, by the name of the option."""
INPUTS = ("text", "runs", "beside")
"""Options with a path that is read."""
OTHER_WORDS = {"attention": ("num_landmarks=0", "projection_dim=0", "window=4")}
"""What an error may name in place of the option or its value."""
FINE = {(command, "text_column"): "plain text has no columns" for command in ("pretrain", "distill")}
"""Where the values of `TEXTS` are not bad, and why."""


@dataclass(frozen=True)
class BadInput:
    """A command line, and what is done to the files that it names before."""

    command: str
    what: str
    arguments: list[str]
    spoil: Callable[[Path], None] = field(default=lambda folder: None)
    named: tuple[str, ...] = ()
    """Of which the error names one, so that it is refused for its own fault."""

    @property
    def name(self) -> str:
        return f"{self.command} {self.what}"


def changed(command: str, option: str, value: str, valid: list[str] | None = None) -> list[str]:
    """The valid command with another value of an option or argument."""
    is_own = command == "finetune" and option in COLUMNS
    arguments = list(valid or (OWN_TABLE if is_own else VALID[command]))
    if not option.startswith("--"):
        place = 1 if option == "out" else 0
        arguments[place] = value
        return arguments
    if option in arguments:
        arguments[arguments.index(option) + 1] = value
        return arguments
    return [*arguments, option, value] if not value.startswith("-") else [*arguments, f"{option}={value}"]


@dataclass(frozen=True)
class Option:
    """A parameter of a command, as its signature declares it."""

    name: str
    shown: str
    """With dashes, or the bare name of an argument."""
    kind: str
    check: object

    @classmethod
    def of(cls, parameter: inspect.Parameter) -> "Option":
        kind, info = get_args(parameter.annotation)[:2]
        dashed = "--" + parameter.name.replace("_", "-")
        shown = parameter.name if isinstance(info, ArgumentInfo) else next(iter(info.param_decls or [dashed]))
        return cls(parameter.name, shown, str(kind), info.parser)


def options_of(command: str) -> list[Option]:
    return [Option.of(parameter) for parameter in inspect.signature(COMMANDS[command]).parameters.values()]


def bad_options() -> Iterator[BadInput]:
    """For every option of every command, values that it must refuse."""
    for command in COMMANDS:
        for option in options_of(command):
            for value in bad_values(command, option):
                given = value if len(value) < 30 else value[:30] + "…"
                words = [option.shown, f"{option.name} {value!r}"[:30], *OTHER_WORDS.get(option.name, ())]
                words += [value[:30]] if len(value) > 3 else []  # shorter ones may be in any sentence
                arguments = changed(command, option.shown, value)
                yield BadInput(command, f"{option.shown} {given!r}", arguments, named=tuple(words))


def bad_values(command: str, option: Option) -> list[str]:
    if isinstance(option.check, Range):
        return _bad_numbers(option.check)
    if isinstance(option.check, Choice):
        return ["", option.check.names[0] + "x", option.check.names[0].upper(), "9" * 6000]
    if "Path" in option.kind and option.name in INPUTS:
        return ["missing", "text.txt/below", "/dev/null", "empty", "pipe"]
    if "Path" in option.kind:
        return ["text.txt/below", "/dev/null", "/dev/null/below", *([] if option.name == "preview" else ["text.txt"])]
    if "bool" in option.kind or (command, option.name) in FINE:
        return []
    return TEXTS[option.name]


def _bad_numbers(check: Range) -> list[str]:
    outside = [check.least - 1, check.most + 1] if check.kind is int else [-1.0, check.most * 2]
    text = ["x", "", "nan", "inf", "-inf", "1e400", "9" * 6000, str(10**18)]
    return [*map(str, outside), *text, *(["1.5"] if check.kind is int else [])]


NESTED = "[" * 100_000
CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "binary": lambda content: bytes(range(256)) * 4,
    "NUL": lambda content: b"\0" * 64,
    "truncated": lambda content: content[: len(content) // 2],
    "{}": lambda content: b"{}",
    "[]": lambda content: b"[]",
    "deeply nested": lambda content: NESTED.encode(),
    "bad UTF-8": lambda content: content[:10] + b"\xff\xfe" + content[10:],
}
FIELDS: dict[str, dict[str, object]] = {
    "0 heads": {"num_attention_heads": 0},
    "3 heads": {"num_attention_heads": 3},
    "heads as text": {"num_attention_heads": "2"},
    "hidden size as text": {"hidden_size": "16"},
    "hidden size below 0": {"hidden_size": -32},
    "hidden size huge": {"hidden_size": 10**9},
    "hidden size other": {"hidden_size": 32},
    "layers huge": {"num_hidden_layers": 10**9},
    "layers missing": {"num_hidden_layers": 3},
    "activation unknown": {"hidden_act": "nope"},
    "dtype unknown": {"dtype": "float99"},
    "vocabulary too small": {"vocab_size": 4},
    "positions as list": {"max_position_embeddings": [64]},
    "type unknown": {"model_type": "nope"},
    "type missing": {"model_type": None},
}
MODEL_TAKERS = {"finetune": "--model", "attention-map": "--model", "convert": "source", "pretrain": "--from",
                "distill": "--model"}  # fmt: skip


def bad_models() -> Iterator[BadInput]:
    """Models with a damaged file, or a configuration that is another's or none, for each command that takes one."""
    for command, option in MODEL_TAKERS.items():
        arguments = changed(command, option, "bert")
        if command == "pretrain":
            place = arguments.index("--tokenizer")
            del arguments[place : place + 2]
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            if file == "tokenizer.json" and command == "convert":
                continue  # the weights are converted without
            for what, change in CONTENTS.items():
                if file != "config.json" and what == "bad UTF-8":
                    continue
                yield BadInput(command, f"{file} {what}", arguments, _rewritten(f"bert/{file}", change))
        for what, fields in FIELDS.items():
            yield BadInput(command, f"config.json {what}", arguments, _with_fields(fields))
        yield BadInput(
            command, "weights missing", arguments, _with_weights(lambda tensors: dict(list(tensors.items())[3:]))
        )
        yield BadInput(
            command, "weights renamed", arguments, _with_weights(lambda ts: {f"x.{n}": t for n, t in ts.items()})
        )
        yield BadInput(command, "a pickle only", arguments, _pickled)
        yield BadInput(command, "pictures, not texts", arguments, _vision)
        yield BadInput(command, "a decoder", arguments, _decoder)


TEXT_FILES = {
    "finetune": ("glue/SST-2/train.tsv", []),
    "lra": ("listops/basic_train.tsv", []),
    "pretrain": ("corpus.txt", []),
    "distill": ("corpus.txt", []),
    "attention-map": ("text.txt", []),
}


def bad_texts() -> Iterator[BadInput]:
    """Texts and tables that hold none."""
    for command, (file, more) in TEXT_FILES.items():
        for what in ("empty", "binary", "NUL", "bad UTF-8"):
            yield BadInput(command, f"{file} {what}", VALID[command] + more, _rewritten(file, CONTENTS[what]))
    for what in ("empty", "binary", "{}", "[]", "truncated", "deeply nested"):
        yield BadInput("lra", f"dataset.json {what}", VALID["lra"], _rewritten("listops/dataset.json", CONTENTS[what]))
    tables = {
        "empty.csv": "",
        "header.csv": "text,label\n",
        "column.csv": "words,label\na,1\n",
        "twice.csv": "text,text,label\na,b,1\n",
        "label.csv": "text,label\n" + "good,1.5\nbad,0.5\n" * 9 + "odd,nan\n",
        "infinite.csv": "text,label\n" + "good,1.5\nbad,0.5\n" * 9 + "odd,1e400\n",
        "nested.jsonl": '{"text": ' + NESTED + "\n",
        "cut.jsonl": '{"text": "a", "label": 1}\n{"text": "b", "la',
        "list.jsonl": "[1, 2]\n",
        "labels.jsonl": '{"text": "a", "label": [1]}\n{"text": "b", "label": {"x": 1}}\n',
        "not.parquet": "PAR1 and nothing else",
        "name.doc": "text",
    }
    for name, content in tables.items():
        yield BadInput("finetune", name, changed("finetune", "--data", name, OWN_TABLE), _written(name, content))


RECORDS = {
    "NUL": "\0\0\0\n",
    "a list": "[1]\n",
    "an empty object": "{}\n",
    "damaged in the middle": '{"job": "lra"\n{"job": "lra"}\n',
    "nested": NESTED + "\n",
    "a machine of text": '{"job": "bench", "metric": "time", "machine": "x", "versions": 3, "config": "y"}\n',
}


def bad_runs() -> Iterator[BadInput]:
    """Folders of runs with records and configurations that are none, for the report and for resuming."""
    for what, content in RECORDS.items():
        for command, arguments in (
            ("report", ["runs", "--out", "out"]),
            ("lra", [*VALID["lra"][:-1], "runs", "--resume"]),
        ):
            yield BadInput(command, f"records {what}", arguments, _written("runs/records.jsonl", content))
    for what in ("empty", "binary", "[]", "truncated", "deeply nested"):
        spoil = _rewritten("runs/config.json", CONTENTS[what])
        yield BadInput("lra", f"resumed with config.json {what}", [*VALID["lra"][:-1], "runs", "--resume"], spoil)


def bad_inputs() -> list[BadInput]:
    return [*bad_options(), *bad_models(), *bad_texts(), *bad_runs()]


def write_inputs(folder: Path) -> None:
    """What the valid commands read."""
    write_bert(folder / "bert")
    write_vocabulary(folder)
    (folder / "text.txt").write_text("the good film is said\n" * 20)
    (folder / "corpus.txt").write_text("\n\n".join(texts(30)))
    (folder / "own.csv").write_text("text,label\n" + "the good film,1\nthe bad film,0\n" * 20)
    (folder / "empty").mkdir()
    write_official(folder / "glue")
    generate(folder / "listops", ListOpsOptions(min_tokens=16, max_tokens=64, train=16, dev=6, test=10))
    write_lra(folder / "runs")
    (folder / "runs" / "config.json").write_text('{"task": "listops"}')


def _rewritten(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: _in_place(folder / file, change)


def _in_place(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def _written(file: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_text(content) and None


def _with_fields(fields: dict[str, object]) -> Callable[[Path], None]:
    def change(content: bytes) -> bytes:
        return json.dumps(json.loads(content) | fields).encode()

    return _rewritten("bert/config.json", change)


def _with_weights(change: Callable[[dict], dict]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "bert" / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        save_file(change(tensors), path, {"format": "pt"})

    return spoil


def _pickled(folder: Path) -> None:
    shutil.move(folder / "bert" / "model.safetensors", folder / "bert" / "pytorch_model.bin")


def _vision(folder: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(folder / "bert")


def _decoder(folder: Path) -> None:
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=99, n_positions=64)
    transformers.GPT2Model(config).save_pretrained(folder / "bert")
