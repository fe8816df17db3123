"""Which files a reader has to open to follow what one call does.

`walked` runs a piece of work and notes every function of the package that is called, and from where. Two counts are
made of that:

- strict: all files with a function that was called, whatever it does;
- on the way: the files that one opens to follow the work itself, from one function of the package to the next. Left out
  are what other packages call back (hooks of a trainer, autograd functions, templates: one knows them from where they
  are handed over), functions that only check or refuse input, names that are imported when first used, the modules at
  the package's root, which every folder may use and whose names say what they do, the bindings of compiled kernels, and
  what lies under a call that is a walk of its own: one reads a training run without reading the model, and a model
  without reading its attention.

A walk returns to a folder if a call comes back into a folder that it has left: a → b → a on one stack. A
sub-folder is a folder of its own.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import nystromformer

PACKAGE = Path(nystromformer.__file__).parent
COMMANDS = ("cli.py", "commands/")
"""What the command line calls through Typer is no hook, but for the parsers of options."""
PARSERS = "commands/__init__.py"
KERNELS = "attention/native/"
NOWHERE = ("-",)
LAZY = ("__getattr__", "__dir__")
GUARDS = ("check", "refuse", "did_you_mean", "warn", "_check", "_refuse")


@dataclass
class Walk:
    """What was called, by file, and the stacks that came back into a folder."""

    strict: dict[str, set[str]] = field(default_factory=dict)
    on_the_way: dict[str, set[str]] = field(default_factory=dict)
    returns: set[tuple[str, ...]] = field(default_factory=set)


@dataclass
class Step:
    """A function of the package on the stack."""

    file: str
    followed: bool


def walked(work: Callable[[], Any], *, stop_at: tuple[str, ...] = NOWHERE, without: tuple[str, ...] = NOWHERE) -> Walk:
    """The walk of `work`. `stop_at` are folders or files whose own calls are walks of their own; `without` those that
    are no part of the work."""
    walk, stacks = Walk(), threading.local()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        file = _file_of(frame.f_code)
        if file is None:
            return
        stack: list[Step] = stacks.__dict__.setdefault("steps", [])
        if event == "return":
            if stack:
                stack.pop()
            return
        above = stack[-1] if stack else Step("", True)
        enters = not stack or (file.startswith(COMMANDS) and above.file.startswith(COMMANDS) and file != PARSERS)
        is_hook = not enters and (frame.f_back is None or _file_of(frame.f_back.f_code) is None)
        goes_on = (file == above.file or not above.file.startswith(stop_at)) and not file.startswith(without)
        followed = above.followed and goes_on and not is_hook and _is_followed(frame.f_code, file)
        stack.append(Step(file, followed))
        walk.strict.setdefault(file, set()).add(frame.f_code.co_qualname)
        if followed:
            walk.on_the_way.setdefault(file, set()).add(frame.f_code.co_qualname)
            folders = [folder for step in stack if step.followed and (folder := _folder_of(step.file))]
            if len(set(folders)) < len(_runs(folders)):
                walk.returns.add(tuple(_runs(folders)))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return walk


def _file_of(code: CodeType) -> str | None:
    """The file in the package; None for others and for what runs on import."""
    if code.co_name == "<module>" or not code.co_filename.startswith(str(PACKAGE)):
        return None
    return str(Path(code.co_filename).relative_to(PACKAGE))


def _is_followed(code: CodeType, file: str) -> bool:
    is_guard = code.co_name.startswith(GUARDS) or code.co_name in LAZY
    is_shared = "/" not in file and file not in COMMANDS
    return not (is_guard or is_shared or file.startswith(KERNELS))


def _folder_of(file: str) -> str:
    return file.rpartition("/")[0]


def _runs(folders: list[str]) -> list[str]:
    return [folder for place, folder in enumerate(folders) if place == 0 or folders[place - 1] != folder]
