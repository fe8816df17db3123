"""Errors and what the user sees of them: one line. Those of the user's say what to do, others where their log is."""

import os
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

LONGEST_LINE = 2_000
"""Characters of an error: what was given may be a whole file."""


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
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise UserError(str(error)) from error


def refuse(message: str) -> int:
    """Show the user one line on stderr; returns the exit code for bad input."""
    _say(message)
    return 2


def report_fault(error: Exception, folder: Path | None) -> int:
    """Keep the traceback of an error that is not the user's in a log file, and say where in one line on stderr.

    The log is in the folder of the run if that exists, otherwise in the system's folder for temporary files. Returns
    the exit code for faults of the program or of the machine.
    """
    name = f"nystromformer-error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    text = f"{shlex.join(sys.argv)}\n\n{''.join(traceback.format_exception(error))}"
    for place in (folder, Path(tempfile.gettempdir())):
        if place is None or not place.is_dir():
            continue
        try:
            (place / name).write_text(text, encoding="utf-8", errors="replace")
        except OSError:  # the disk is full or can't be written
            continue
        where = f"the traceback is in {place / name}"
        break
    else:
        where = "there is no room for a log with the traceback"
    first = " ".join(str(error).split())[:300]
    _say(f"unexpected {type(error).__name__}{': ' + first if first else ''}; {where}.")
    return 1


def install_hint(*extras: str) -> str:
    """The command that installs this package with some extras.

    The name that pip knows comes from the installed metadata: it differs from the name that Python imports.

    >>> install_hint("models", "cli")
    "pip install 'nystromformer-torch[models,cli]'"
    """
    return f"pip install '{_distribution()}[{','.join(extras)}]'"


def is_missing_package(error: Exception) -> bool:
    """Whether a package of others is not installed. A missing part of our own is a fault."""
    return isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] not in ("", "nystromformer")


def missing_package(error: ModuleNotFoundError, *extras: str) -> str:
    """Says which package was not found and which extras bring it. A missing part of our own is raised again."""
    if not is_missing_package(error):
        raise error
    return f"needs {error.name}, which is not installed; {install_hint(*extras)}."


def _say(message: str) -> None:
    line = " ".join("".join(character if character.isprintable() else " " for character in message).split())
    print(f"nystromformer: {line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + '…'}", file=sys.stderr)


def _distribution() -> str:
    """The name under which pip installed this package: that of the distribution that brings our command.

    Looked up by the command, as other distributions, too, may bring a package `nystromformer`. A source tree that was
    never installed has no name yet: "." is what pip calls the tree it is run in.
    """
    commands = metadata.entry_points(group="console_scripts", name="nystromformer")
    ours = [command.dist for command in commands if command.module == "nystromformer.__main__"]
    return ours[0].name if ours and ours[0] is not None else "."
