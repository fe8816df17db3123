"""Checks of what users pass in, for functions and command-line options alike. Needs no torch.

Every message says what was given, what is allowed and what to do.
"""

import difflib
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LARGEST_SEED = 2**32 - 1
"""What NumPy takes."""


def did_you_mean(given: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the closest choice, or nothing when none is close.

    >>> did_you_mean("nystrm", ["nystrom", "linear"])
    " Did you mean 'nystrom'?"
    """
    matches = difflib.get_close_matches(str(given).lower(), list(choices), n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def check_choice(name: str, given: object, choices: Iterable[str]) -> None:
    choices = list(choices)
    if given not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={given!r}: must be one of {allowed}.{did_you_mean(str(given), choices)}")


def check_at_least(name: str, given: Any, minimum: int, hint: str = "") -> None:
    """`given` must be a whole number of at least `minimum`."""
    if isinstance(given, bool) or not (isinstance(given, int) or _is_symbolic(given)):
        raise TypeError(f"{name}={given!r} is a {type(given).__name__}: must be a whole number of at least {minimum}.")
    if given < minimum:
        raise ValueError(f"{name}={given}: must be at least {minimum}{'; ' + hint if hint else ''}.")


def check_odd(name: str, given: Any) -> None:
    check_at_least(name, given, 1)
    if given % 2 == 0:
        raise ValueError(f"{name}={given}: must be odd, so that it has a center; use {given - 1} or {given + 1}.")


def check_number(name: str, given: object, minimum: float = -math.inf, hint: str = "") -> None:
    """`given` must be a finite number of at least `minimum`."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name}={given!r} is a {type(given).__name__}: must be a number{'; ' + hint if hint else ''}.")
    if not minimum <= given < math.inf or given == -math.inf:
        least = "" if minimum == -math.inf else f" and at least {minimum}"
        raise ValueError(f"{name}={given}: must be finite{least}{'; ' + hint if hint else ''}.")


def check_fraction(name: str, given: object) -> None:
    """`given` must be a probability below one, as for dropout."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name}={given!r} is a {type(given).__name__}: must be a number with 0 <= {name} < 1.")
    if not 0 <= given < 1:
        raise ValueError(f"{name}={given}: must be at least 0 and below 1.")


def parse_names(option: str, text: str) -> tuple[str, ...]:
    """The names in an option's value, in order and once each.

    >>> parse_names("--attention", "standard, nystrom-64,standard")
    ('standard', 'nystrom-64')
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError(f"{option} {text!r}: must be names separated by commas, none of them empty.")
    return tuple(dict.fromkeys(names))


def parse_whole_numbers(option: str, text: str, least: int, most: int) -> list[int]:
    """The numbers in an option's value, in order and once each.

    >>> parse_whole_numbers("--seeds", "3, 1,3", 0, 9)
    [3, 1]
    """
    names = [name.strip() for name in text.split(",")]
    # text longer than any limit is not converted: Python refuses numbers of thousands of digits
    digits = all(name.isascii() and name.isdecimal() and len(name) <= 20 for name in names)
    if not digits or not all(least <= int(name) <= most for name in names):
        given = text if len(text) <= 60 else text[:60] + "…"
        raise ValueError(
            f"{option} {given!r}: must be whole numbers separated by commas, each from {least} to {most:,}."
        )
    return list(dict.fromkeys(int(name) for name in names))


def check_new_folder(option: str, path: Path) -> None:
    """`path` must be a folder that can be written, or a place where one can be made. Nothing is written."""
    above = path
    while not above.exists() and not above.is_symlink() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        what = "is a file" if above.is_file() else "is no folder"
        raise ValueError(f"{option} {path}: {above} {what}; give a folder.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {path}: {above} can't be written to; give another folder.")


def check_file(option: str, path: Path) -> None:
    """`path` must be a file that can be read: no folder, and no device or pipe, which may never end."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is a device or pipe" if path.exists() else "does not exist"
        raise ValueError(f"{option} {path}: {what}; give a file.")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{option} {path}: can't be read; change its permissions.")


def _is_symbolic(given: object) -> bool:
    """Whether `given` is a size of a tensor in an exported graph: such a number exists only where torch is loaded."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.SymInt)
