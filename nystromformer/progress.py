"""Progress bars with the time left, one look for all jobs."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def duration(seconds: float) -> str:
    """Hours, minutes, seconds.

    >>> duration(3725)
    '1:02:05'
    """
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


class Bar(Progress):
    """A bar that is drawn by who updates it, with `refresh=True` and ten times per second at most.

    It has no thread: Python waits forever for one that finds no memory to begin, and processes that load data are
    forked while training shows its bar. `ticking` lets one run, for bars whose steps may take minutes.
    """

    def __init__(self, *columns: ProgressColumn, console: Console | None = None, ticking: bool = False) -> None:
        self.drawn = float("-inf")
        console = console or Console(stderr=True)
        super().__init__(TextColumn("{task.description}"), BarColumn(), *columns, console=console, auto_refresh=ticking)

    def refresh(self) -> None:
        if time.monotonic() - self.drawn >= 0.1:
            super().refresh()
            self.drawn = time.monotonic()


@contextmanager
def count_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for work that reports (done, wanted)."""
    with Bar(MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left")) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, wanted: bar.update(task, completed=done, total=wanted, refresh=True)


@contextmanager
def share_bar(title: str) -> Iterator[Callable[[float], None]]:
    """A bar with the time left; the function it gives is told how much is done, from 0 to 1."""
    bar = Bar(TaskProgressColumn(), TimeRemainingColumn(), TextColumn("left"))
    task = bar.add_task(title, total=1.0)

    def show(share: float) -> None:
        bar.start()  # nothing to do is nothing to show
        bar.update(task, completed=share, refresh=True)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


@contextmanager
def steps_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar with the time left; the function it gives is called before each of `total` steps, with a label."""
    with Bar(MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), ticking=True) as bar:
        task = bar.add_task("starting", total=total)
        started = False

        def step(label: str) -> None:
            nonlocal started
            bar.update(task, description=label, advance=1 if started else 0)
            started = True

        yield step
        bar.update(task, description="done", completed=total)
