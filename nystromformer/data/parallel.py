"""Work shared out to processes, with results in the order of the work."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from threading import Thread
from typing import TypeVar

Given = TypeVar("Given")

Result = TypeVar("Result")

Progress = Callable[[int, int], None]
"""Is called with how much is done and how much is wanted."""

AHEAD = 3
"""Pieces of work handed out for each process before the first result is taken."""


def usable_cores() -> int:
    """Those that this process may run on: not all of the machine where a scheduler or a container gave it a share."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[Given], Result], pieces: Iterable[Given], workers: int | None = None) -> Iterator[Result]:
    """`map(work, pieces)` on several processes, by default on all cores that this one may use. `pieces` may be endless.

    >>> list(in_order(abs, [-1, -2], workers=1))
    [1, 2]
    """
    workers = workers or usable_cores()
    if workers == 1:
        yield from map(work, pieces)
        return
    # Processes are started afresh: a fork of one that has used threads can hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=leave_with_parent) as pool:
        pieces = iter(pieces)
        waiting = deque(pool.submit(work, piece) for piece in islice(pieces, AHEAD * workers))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(work, piece) for piece in islice(pieces, 1))
                yield result
        finally:
            pool.shutdown(cancel_futures=True)


def leave_with_parent() -> None:
    """End this process when the one that started it is killed; it would wait for work for ever."""

    def watch() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    Thread(target=watch, daemon=True).start()
