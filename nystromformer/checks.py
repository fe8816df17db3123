"""Checks of what users pass in, for functions and command-line options alike. Needs no torch.

Every message says what was given, what is allowed and what to do.
"""

import difflib
from collections.abc import Iterable

import torch


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


def check_at_least(name: str, given: object, minimum: int, hint: str = "") -> None:
    """`given` must be a whole number of at least `minimum`."""
    if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)):
        raise TypeError(f"{name}={given!r} is a {type(given).__name__}: must be a whole number of at least {minimum}.")
    if given < minimum:
        raise ValueError(f"{name}={given}: must be at least {minimum}{'; ' + hint if hint else ''}.")


def check_fraction(name: str, given: object) -> None:
    """`given` must be a probability below one, as for dropout."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name}={given!r} is a {type(given).__name__}: must be a number with 0 <= {name} < 1.")
    if not 0 <= given < 1:
        raise ValueError(f"{name}={given}: must be at least 0 and below 1.")


def check_odd(name: str, given: object) -> None:
    check_at_least(name, given, 1)
    if given % 2 == 0:
        raise ValueError(f"{name}={given}: must be odd, so that it has a centre; use {given - 1} or {given + 1}.")
