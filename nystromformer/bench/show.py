"""The benchmark in a terminal: a progress bar while it runs, tables when it is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from nystromformer.bench.table import LIMIT, Cells, captions, columns, memory_text, peer_rows, time_text


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar with the time left; the function it gives is called before each of `total` steps, with a label."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("starting", total=total)
        started = False

        def step(label: str) -> None:
            nonlocal started
            bar.update(task, description=label, advance=1 if started else 0)
            started = True

        yield step
        bar.update(task, description="done", completed=total)


def print_tables(table: Cells) -> None:
    console = Console()
    lengths = columns(table)
    header = ["attention", *(f"n = {n:,}" for n in lengths)]
    for title, text in (("Time", time_text), ("Peak memory", memory_text)):
        rows = [[name, *(text(table, name, n) for n in lengths)] for name in table if name != LIMIT or title == "Time"]
        console.print(_table(title, header, rows))
    if peers := peer_rows(table):
        console.print(_table("nystrom-64 against the same work elsewhere", header, peers))
    for caption in captions(table):
        console.print(caption, style="dim", highlight=False)


def _table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row, style="bold" if row[0].startswith("nystrom-6") else None)
    return table
