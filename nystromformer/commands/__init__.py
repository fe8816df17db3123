"""The commands, one per file, and what their options have in common. Importing them needs no torch.

An option is declared once, in the signature of its command, or in `train_options` for all commands that train and
`corpus_options` for those that do on plain text: name, type, default, range and help. What is out of range is refused
before anything is imported, read or written. From there on a command hands its options on by their names; one that is
named like a field of the recipe changes that field.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from nystromformer.checks import LARGEST_SEED, check_file, check_new_folder, did_you_mean
from nystromformer.errors import user_input
from nystromformer.training import DEVICES, DTYPES, LRA_PRESETS, PRESETS, SAVE_SECONDS

MANY = 10**9
"""More steps, examples or tokens than any run has."""
LONGEST = 2**20
"""Tokens of the longest input."""


@dataclass(frozen=True)
class Range:
    """Reads a number from an option's text, and refuses others than from `least` to `most`."""

    kind: type[int] | type[float]
    least: float
    most: float

    def __call__(self, given: Any) -> float:
        try:
            value = self.kind(given)
        except (ValueError, OverflowError):
            value = math.nan
        if not self.least <= value <= self.most:  # which nan never is
            raise typer.BadParameter(f"{_short(given)}: must be {self}.")
        return value

    def __str__(self) -> str:
        return f"a {'whole ' if self.kind is int else ''}number from {self.least:,} to {self.most:,}"


@dataclass(frozen=True)
class Choice:
    """Takes one of some names."""

    names: tuple[str, ...]

    def __call__(self, given: str) -> str:
        if given not in self.names:
            raise typer.BadParameter(
                f"{_short(given)}: must be one of {', '.join(self.names)}.{did_you_mean(given, self.names)}"
            )
        return given


def whole_number(help: str, least: int = 1, most: int = MANY) -> OptionInfo:
    return typer.Option(help=help, parser=Range(int, least, most), metavar=f"{least} to {most:,}")


def number(help: str, least: float, most: float) -> OptionInfo:
    return typer.Option(help=help, parser=Range(float, least, most), metavar=f"{least} to {most:,}")


def seed_of(what: str) -> OptionInfo:
    return whole_number(f"Seed of {what}.", least=0, most=LARGEST_SEED)


def choice(help: str, *names: str) -> OptionInfo:
    return typer.Option(help=help, parser=Choice(names), metavar="|".join(names))


def new_folder(help: str) -> OptionInfo:
    """A folder to write; it may exist, or there must be a place for it."""
    return typer.Option(help=help, callback=_checked_by(check_new_folder))


def text_file(help: str) -> OptionInfo:
    return typer.Option(help=help, callback=_checked_by(check_file))


def _checked_by(check: Callable[[str, Path], None]) -> Callable[[typer.CallbackParam, Path | None], Path | None]:
    def checked(parameter: typer.CallbackParam, value: Path | None) -> Path | None:
        if value is not None:
            with user_input():
                check(parameter.opts[0], value)
        return value

    return checked


def _short(given: object) -> str:
    return repr(given) if len(str(given)) <= 60 else repr(str(given)[:60] + "…")


Preset = Annotated[str, choice("The paper's recipe, minutes on two cores, or seconds.", *PRESETS)]
LraPreset = Annotated[str, choice("The paper's recipe, an hour or minutes on two cores, or seconds.", *LRA_PRESETS)]
Seeds = Annotated[str, typer.Option(help="Several seeds, as 1,2,3: mean and deviation.")]
Packed = Annotated[
    int | None,
    whole_number("Train on about so many tokens per step, packed without padding, in place of --batch-size examples."),
]
TrainingDtype = Annotated[str, choice("Precision of training.", *DTYPES)]
Dtype = Annotated[str, choice("Precision of the model.", "float32", "float16", "bfloat16", "float64")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]


def train_options(
    preset: Preset = "paper",
    steps: Annotated[int | None, whole_number("Training steps; warm-up shrinks in proportion.")] = None,
    batch_size: Annotated[int | None, whole_number("Examples of a step, over all processes.", most=LONGEST)] = None,
    max_length: Annotated[int | None, whole_number("Cut longer inputs here.", most=LONGEST)] = None,
    seed: Annotated[int, seed_of("weights, dropout and the order of examples")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Resume where the run in this folder stopped.")] = False,
    save_seconds: Annotated[
        float, number("Write a checkpoint at least so often: what a kill without warning costs.", 1, 1_000_000)
    ] = SAVE_SECONDS,
    device: Annotated[str, choice("Where to train.", *DEVICES)] = "auto",
    dtype: TrainingDtype = "float32",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value for any field of TrainingArguments; may be repeated.")
    ] = None,
) -> None:
    """The options of every command that trains. One that says it differently declares its own."""


def corpus_options(
    corpus: Annotated[
        list[str], typer.Option(help="Files (parquet, JSON lines, text), folders or Hub ids; may be repeated.")
    ],
    text_column: Annotated[str, typer.Option(help="The column of parquet files and JSON lines with the text.")] = (
        "text"
    ),
    documents: Annotated[str, choice("What divides text files into documents.", "blank-line", "line", "file")] = (
        "blank-line"
    ),
) -> None:
    """The options of every command that trains on plain text."""


def with_options(*groups: Callable[..., None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the options of `groups` in place of its `**common`, which holds their values when it is called.

    Its own declaration of an option comes before that of a group. What must be given stands first in the help.
    """

    def extended(command: Callable[..., None]) -> Callable[..., None]:
        options: dict[str, inspect.Parameter] = {}
        for source in (command, *groups):
            for name, option in inspect.signature(source).parameters.items():
                if option.kind is not option.VAR_KEYWORD:
                    options.setdefault(name, option.replace(kind=option.KEYWORD_ONLY))
        listed = sorted(options.values(), key=lambda option: option.default is not option.empty)
        command.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
        return command

    return extended


training_command = with_options(train_options)
corpus_command = with_options(corpus_options, train_options)
