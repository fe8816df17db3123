"""Errors that are the user's to fix. The command line shows them as one line, without a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata


class UserError(Exception):
    """Says what was given, what is allowed and what to do."""


class Stopped(Exception):
    """A signal ended the work where it can be resumed; the message says how."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def user_input() -> Iterator[None]:
    """Errors raised inside while input is being read or checked are the user's to fix.

    >>> with user_input():
    ...     raise ValueError("num_landmarks=0: must be at least 1.")
    Traceback (most recent call last):
    nystromformer.errors.UserError: num_landmarks=0: must be at least 1.
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise UserError(str(error)) from error


def refuse(message: str) -> int:
    """Show the user one line on stderr; returns the exit code for bad input."""
    print("nystromformer: " + " ".join(message.split()), file=sys.stderr)
    return 2


def install_hint(*extras: str) -> str:
    """The command that installs this package with some extras.

    The name that pip knows comes from the installed metadata: it differs from the name that Python imports.

    >>> install_hint("models", "cli")
    "pip install 'nystromformer-torch[models,cli]'"
    """
    return f"pip install '{_distribution()}[{','.join(extras)}]'"


def missing_package(error: ModuleNotFoundError, *extras: str) -> str:
    """Says which package was not found and which extras bring it. A missing part of our own is raised again."""
    if (error.name or "nystromformer").split(".")[0] == "nystromformer":
        raise error
    return f"needs {error.name}, which is not installed; {install_hint(*extras)}."


def _distribution() -> str:
    """The name under which pip installed this package: that of the distribution that brings our command.

    Looked up by the command, as other distributions, too, may bring a package `nystromformer`. A source tree that was
    never installed has no name yet: "." is what pip calls the tree it is run in.
    """
    commands = metadata.entry_points(group="console_scripts", name="nystromformer")
    ours = [command.dist.name for command in commands if command.module == "nystromformer.__main__"]
    return ours[0] if ours else "."
