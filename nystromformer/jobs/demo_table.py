"""What the demo says in the end: two small tables."""

from rich.console import Console
from rich.table import Table

from nystromformer.bench.table import Cell, cells, columns
from nystromformer.records import results

Record = dict[str, object]
NAMES = {"standard": "exact", "dense": "exact, n×n matrix", "nystrom-64": "nystrom-64 (ours)"}
NOTE = (
    "exact: PyTorch's fused kernel; with the n×n matrix in memory it is what the paper compares with. Memory: peak of "
    "one call above its inputs. The models saw {examples:,} examples each, with one seed: too few to tell small "
    "differences between them, or how far they would get. All of it took {minutes:.1f} minutes."
)


def print_summary(records: list[Record]) -> None:
    console = Console()
    console.print(training_table(records))
    console.print(efficiency_table(records))
    trained = results(records, "lra")[0]
    minutes = sum(seconds_of_parts(records).values()) / 60
    note = NOTE.format(examples=trained["examples_seen"], minutes=minutes)
    console.print(note, style="dim", highlight=False)


def training_table(records: list[Record]) -> Table:
    seconds, trained = seconds_of_parts(records), results(records, "lra")
    title = f"ListOps of up to {trained[0]['config']['max_length']} tokens"
    table = Table("attention", title=title, title_justify="left")
    for name in ("test accuracy", "most frequent class", "time"):
        table.add_column(name, justify="right")
    for record in trained:
        attention = record["config"]["attention"]
        took = seconds[f"training, {attention}"]
        table.add_row(attention, f"{record['value']:.1%}", f"{record['majority']:.1%}", f"{took:,.0f} s")
    return table


def efficiency_table(records: list[Record]) -> Table:
    measured = cells(record for record in records if record["job"] == "bench" and record.get("attention") != "gemm")
    table = Table("attention", title="Time and memory of one call, 12 heads × 64", title_justify="left")
    for length in columns(measured):
        table.add_column(f"n = {length:,}", justify="right")
    for name, by_length in measured.items():
        row = [cell_text(by_length.get(length, Cell())) for length in columns(measured)]
        table.add_row(NAMES.get(name, name), *row, style="bold" if name.startswith("nystrom-6") else None)
    return table


def cell_text(cell: Cell) -> str:
    """
    >>> cell_text(Cell(seconds=0.0123, bytes=3_000_000)), cell_text(Cell(seconds=1.2345, bytes=1_612_000_000))
    ('12.3 ms, 3 MB', '1,234 ms, 1.6 GB')
    """
    if cell.seconds is None or cell.bytes is None:
        return cell.reason or "–"
    time = f"{cell.seconds * 1e3:,.{1 if cell.seconds < 0.1 else 0}f} ms"
    return f"{time}, {cell.bytes / 1e9:,.1f} GB" if cell.bytes >= 1e9 else f"{time}, {cell.bytes / 1e6:,.0f} MB"


def seconds_of_parts(records: list[Record]) -> dict[str, float]:
    return {record["part"]: record["value"] for record in records if record["job"] == "demo"}
