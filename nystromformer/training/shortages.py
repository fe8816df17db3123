"""Disk and memory that do not suffice are the user's to provide: one line says so, and that nothing is lost."""

import errno
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from safetensors import SafetensorError

from nystromformer.errors import UserError

LACK_OF_MEMORY = ("can't allocate memory", "bad_alloc", "can't start new thread", "could not create a primitive")
"""How torch, C++, Python's threads and oneDNN say it."""

ROOM_FOR_A_THREAD = 32 * 2**20
"""Bytes: a stack of the usual 8 MB, and what Python needs to begin there."""


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
