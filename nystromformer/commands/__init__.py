"""The commands, one per file, and what their options have in common. Importing them needs no torch.

An option is declared once, in the signature of its command: name, type, default, range and help. What is out of range
is refused before anything is imported, read or written. From there on a command hands its options on by their names.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from nystromformer.checks import LARGEST_SEED, check_file, check_new_folder, did_you_mean
from nystromformer.errors import user_input

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


Preset = Annotated[str, choice("The paper's recipe, minutes on two cores, or seconds.", "paper", "mini", "smoke")]
Steps = Annotated[int | None, whole_number("Training steps; warm-up shrinks in proportion.")]
BatchSize = Annotated[int | None, whole_number("Examples of a step, over all processes.", most=LONGEST)]
Seeds = Annotated[str, typer.Option(help="Several seeds, as 1,2,3: mean and deviation.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume where the run in this folder stopped.")]
SaveSeconds = Annotated[
    float, number("Write a checkpoint at least so often: what a kill without warning costs.", 1, 1_000_000)
]
TrainingDevice = Annotated[str, choice("Where to train.", "auto", "cpu", "cuda")]
TrainingDtype = Annotated[str, choice("Precision of training.", "float32", "bfloat16", "float16")]
Dtype = Annotated[str, choice("Precision of the model.", "float32", "float16", "bfloat16", "float64")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="name=value for any field of TrainingArguments; may be repeated.")
]
