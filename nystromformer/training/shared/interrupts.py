"""What ends a training run early: signals, and disk or memory that do not suffice.

SIGTERM (batch systems, machines that can be reclaimed) and SIGINT (Ctrl-C) let the step end, write a checkpoint and say
how to resume; a second signal ends the process at once. A checkpoint every so many seconds bounds what is lost without
any warning. Disk and memory are the user's to provide: one line says what is short, and that nothing is lost.
"""

import errno
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from nystromformer.errors import Stopped, UserError
from nystromformer.records import command

SIGNALS = (signal.SIGTERM, signal.SIGINT)

HAS_SIGWAITINFO = hasattr(signal, "sigwaitinfo")
"""Not on macOS."""

SHOW_CURSOR = "\x1b[?25h"
"""Progress bars hide it."""

LACK_OF_MEMORY = ("can't allocate memory", "bad_alloc", "can't start new thread", "could not create a primitive")
"""How torch, C++, Python's threads and oneDNN say it."""

ROOM_FOR_A_THREAD = 32 * 2**20
"""Bytes: a stack of the usual 8 MB, and what Python needs to begin there."""


class Interrupts(TrainerCallback):
    """Ends training after the step in which a signal came, with a checkpoint, and saves every so many seconds.

    All processes of a run agree on the step. An evaluation is part of its step and not cut short.
    """

    def __init__(self, save_seconds: float) -> None:
        self.save_seconds, self.saved = save_seconds, 0.0
        self.signal = 0
        self.is_training = False

    def on_train_begin(self, args, state, control, **_: Any) -> None:
        self.is_training, self.saved = True, time.monotonic()

    def on_step_end(self, args, state, control, **_: Any) -> None:
        is_due = time.monotonic() - self.saved >= self.save_seconds
        self.signal, due_anywhere = _highest(args, self.signal, int(is_due))
        control.should_save |= bool(self.signal or due_anywhere)

    def on_save(self, args, state, control, **_: Any) -> None:
        self.saved = time.monotonic()
        if self.signal:
            self.stop(f"after step {state.global_step:,} of {state.max_steps:,}")

    def on_train_end(self, args, state, control, **_: Any) -> None:
        self.is_training = False

    def on_prediction_step(self, args, state, control, **_: Any) -> None:
        if self.signal and not self.is_training:
            self.stop("before the trained model was measured")

    def stop(self, when: str) -> NoReturn:
        raise Stopped(f"stopped {when}; resume with: {resume_command()}", code=128 + self.signal)


@contextmanager
def interrupts(save_seconds: float) -> Iterator[Interrupts]:
    """Catch the signals that ask a process to end, for a callback that sees to it."""
    caught = Interrupts(save_seconds)

    def handle(number: int, _: object) -> None:
        if caught.signal:
            _say(SHOW_CURSOR if sys.stderr.isatty() else "")
            os._exit(128 + number)
        caught.signal = number
        _say(f"\n{signal.Signals(number).name}: this step is finished and saved; a second signal ends at once.\n")

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield caught
        return
    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def resume_command() -> str:
    """What to type to resume the run of this process.

    A script of somebody's own that runs our commands has no such option: it is to be started again.
    """
    given = command()
    is_ours = Path(sys.argv[0]).suffix != ".py" or Path(sys.argv[0]).name == "__main__.py"
    given = f"{given} --resume" if is_ours and "--resume" not in given.split() else given
    processes = os.environ.get("WORLD_SIZE", "1")
    return given if processes == "1" else f"{given} (by torchrun, with {processes} processes as before)"


def leave_to_their_parent(loader: DataLoader) -> None:
    """Let the processes that load data serve their parent to the end: only it may end them.

    Terminals and batch systems signal all processes of a job. The step that is to be finished needs its data.
    """
    loader = getattr(loader, "base_dataloader", loader)  # accelerate's are no loaders themselves, but hold one
    if loader.num_workers:
        loader.worker_init_fn = partial(_serve_parent, loader.worker_init_fn)
        if HAS_SIGWAITINFO:
            loader.multiprocessing_context = _Workers()


class _Worker(ForkProcess):
    """A process whose signals wait from its first moment on until it knows what to do with them."""

    def start(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Workers(ForkContext):
    Process = _Worker


def _serve_parent(init: Callable[[int], None] | None, worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if HAS_SIGWAITINFO:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        threading.Thread(target=_wait_for_parent, daemon=True).start()
    if init is not None:
        init(worker)


def _wait_for_parent() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


def _highest(args, *values: int) -> list[int]:
    """Of each value the highest that any process has."""
    if args.world_size == 1:
        return list(values)
    found = torch.tensor(values, device=args.device)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
    return found.tolist()


def _say(text: str) -> None:
    """Without Python's buffers, which may be in the middle of a line."""
    os.write(2, text.encode())


@contextmanager
def shortage_told() -> Iterator[None]:
    """Errors of a disk that is full or gone, and of lacking memory, as `UserError`. What is written is whole."""
    try:
        yield
    except (OSError, SafetensorError, MemoryError, RuntimeError) as error:
        if _is_lack_of_memory(error):
            raise UserError(
                f"memory does not suffice ({str(error).splitlines()[0] if str(error) else 'MemoryError'}): resume with "
                f"--resume where there is more, or give a smaller --batch-size or --max-length with another --out."
            ) from error
        if isinstance(error, (OSError, SafetensorError)):
            raise UserError(f"{error}; what is written is whole: when there is room, resume with --resume.") from error
        raise


def check_room_for_a_thread() -> None:
    """Raise `MemoryError` where a thread would not find the memory to begin: Python would wait for it forever."""
    try:
        mmap.mmap(-1, ROOM_FOR_A_THREAD).close()
    except OSError as error:
        raise MemoryError(f"{ROOM_FOR_A_THREAD:,} bytes for a thread: {error}") from error


def _is_lack_of_memory(error: Exception) -> bool:
    lacks = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or getattr(error, "errno", None) == errno.ENOMEM
    return lacks or any(sign in str(error) for sign in LACK_OF_MEMORY)
