"""Errors that are the user's to mend. The command line shows them as one line, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Says what was given, what is allowed and what to do."""


@contextmanager
def user_input() -> Iterator[None]:
    """Errors raised inside while input is being read or checked are the user's to mend.

    >>> with user_input():
    ...     raise ValueError("num_landmarks=0: must be at least 1.")
    Traceback (most recent call last):
    nystromformer.errors.UserError: num_landmarks=0: must be at least 1.
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise UserError(str(error)) from error
