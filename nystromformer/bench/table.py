"""Tables and plots of what was measured."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, LogLocator

from nystromformer.bench.cases import DENSE, PEERS
from nystromformer.figures import save_figure
from nystromformer.paper import EFFICIENCY
from nystromformer.records import table_markdown

TIME_BASELINE = "standard"
"""Exact attention by PyTorch's fused kernel: the fastest that people would use instead."""

MEMORY_BASELINES = (DENSE, "standard")
"""Exact attention with its matrix in memory, as the paper measured it; the fused kernel where that was not run."""

LIMIT = "GEMM-bound limit"


@dataclass(frozen=True)
class Entry:
    """What was measured of one attention at one length; None where it was not, with the reason."""

    seconds: float | None = None
    minimum: float | None = None
    bytes: int | None = None
    reason: str = ""


Entries = dict[str, dict[int, Entry]]  # by attention, then length


def cells(records: Iterable[dict]) -> Entries:
    """The newest measurement of each cell, in the order of the records; rows of the limit are added."""
    parts: dict[str, dict[int, dict]] = {}
    limits: dict[int, float] = {}
    for record in records:
        attention, length = record.get("attention"), record.get("length")
        if attention == "gemm":
            limits[length] = record["minimum"] / record["flops"]
            continue
        part = parts.setdefault(attention, {}).setdefault(length, {})
        if record["metric"] == "time":
            part |= {"seconds": record["value"], "minimum": record["minimum"], "details": record}
        elif record["metric"] == "peak_memory":
            part |= {"bytes": record["value"], "reason": record["skipped"] or record["failure"]}
    found = {
        name: {n: Entry(**{k: v for k, v in part.items() if k != "details"}) for n, part in by_length.items()}
        for name, by_length in parts.items()
    }
    ours = parts.get("nystrom-64", {})
    limit = {
        n: Entry(seconds=limits[n] * nystrom_flops(part["details"]), minimum=limits[n] * nystrom_flops(part["details"]))
        for n, part in ours.items()
        if n in limits and "details" in part and not part["details"]["backward"]
    }
    return found | ({LIMIT: limit} if limit else {})


def nystrom_flops(details: dict, landmarks: int = 64, kernel: int = 33, iterations: int = 6) -> int:
    """Multiply-adds of Nyström attention, forward, times two: four products with n and m, the pseudoinverse, the
    convolution.

    >>> nystrom_flops({"batch": 1, "heads": 12, "head_dim": 64, "length": 8192}) / 1e9
    3.800039424
    """
    b, h, d, n, m = details["batch"], details["heads"], details["head_dim"], details["length"], landmarks
    products, inverse, convolution = 4 * n * m * d, (4 * iterations + 1) * m**3 + m * m * d, n * kernel * d
    return 2 * b * h * (products + inverse + convolution)


def ratio(baseline: float | None, value: float | None) -> float | None:
    """How many times less `value` is than `baseline`; None where one is missing."""
    return baseline / value if baseline and value else None


def paper_ratio(attention: str, length: int, column: int) -> float | None:
    """The paper's own ratio to standard attention; column 0 is memory, 1 is time."""
    if attention not in EFFICIENCY or length not in EFFICIENCY[attention]:
        return None
    return EFFICIENCY["standard"][length][column] / EFFICIENCY[attention][length][column]


def time_text(table: Entries, attention: str, length: int) -> str:
    cell = table[attention].get(length, Entry(reason="not run"))
    if cell.seconds is None:
        return cell.reason or "not run"
    base = table.get(TIME_BASELINE, {}).get(length, Entry()).seconds
    return f"{cell.seconds * 1e3:,.1f} ms" + _ratios(ratio(base, cell.seconds), paper_ratio(attention, length, 1))


def memory_text(table: Entries, attention: str, length: int) -> str:
    cell = table[attention].get(length, Entry(reason="not run"))
    if attention == LIMIT:
        return "–"
    if cell.bytes is None:
        return cell.reason or "not run"
    base = next((table[name][length].bytes for name in MEMORY_BASELINES if length in table.get(name, {})), None)
    return f"{cell.bytes / 1e6:,.0f} MB" + _ratios(ratio(base, cell.bytes), paper_ratio(attention, length, 0))


def _ratios(ours: float | None, papers: float | None) -> str:
    return (f" ({ours:.1f}×)" if ours else "") + (f" [{papers:.1f}×]" if papers else "")


def columns(table: Entries) -> list[int]:
    return sorted({length for by_length in table.values() for length in by_length})


def peer_rows(table: Entries) -> list[list[str]]:
    """How many times faster, and with how many times less memory, `nystrom-64` does the same work as each peer."""
    ours = table.get("nystrom-64", {})
    rows = []
    for peer in PEERS:
        if peer in table:
            texts = []
            for n in columns(table):
                mine, theirs = ours.get(n, Entry()), table[peer].get(n, Entry())
                time, memory = ratio(theirs.seconds, mine.seconds), ratio(theirs.bytes, mine.bytes)
                texts.append(f"{time:.1f}× time, {memory:.1f}× memory" if time and memory else "–")
            rows.append([peer, *texts])
    return rows


def captions(table: Entries) -> list[str]:
    memory_base = next((name for name in MEMORY_BASELINES if name in table), None)
    return [
        f"Time: median of interleaved repeats; (×) faster than `{TIME_BASELINE}`, [×] the paper's own ratio.",
        f"Memory: peak of one call above its inputs; (×) less than `{memory_base}`, [×] the paper's own ratio.",
        f"{LIMIT}: the operation's arithmetic at the speed of a {2048}×{2048} matrix product in the same run.",
    ]


def markdown(records: Iterable[dict]) -> str:
    """The tables as Markdown."""
    table = cells(records)
    lengths = columns(table)
    header = ["attention", *(f"n = {n:,}" for n in lengths)]
    parts = []
    for title, text in (("Time", time_text), ("Peak memory", memory_text)):
        rows = [[name, *(text(table, name, n) for n in lengths)] for name in table if name != LIMIT or title == "Time"]
        parts.append(f"## {title}\n\n{table_markdown(header, rows)}")
    if peers := peer_rows(table):
        parts.append(f"## `nystrom-64` against the same work elsewhere\n\n{table_markdown(header, peers)}")
    return "\n\n".join([*parts, *captions(table)]) + "\n"


matplotlib.use("Agg")


OURS = ("nystrom-64", "nystrom-32", "nystrom", "nystrom-local")


def draw_plots(table: Entries, folder: Path) -> list[Path]:
    """Write `time.{png,svg}` and `memory.{png,svg}`; returns their paths."""
    return [
        path
        for name, label, value in (
            ("time", "time of one call (ms)", lambda cell: None if cell.seconds is None else cell.seconds * 1e3),
            ("memory", "peak memory of one call (MB)", lambda cell: None if cell.bytes is None else cell.bytes / 1e6),
        )
        for path in _draw(table, folder / name, label, value)
    ]


def _draw(table: Entries, path: Path, label: str, value) -> list[Path]:
    figure, axes = pyplot.subplots(figsize=(6.0, 4.9), layout="constrained")
    lengths = columns(table)
    for index, (name, by_length) in enumerate(table.items()):
        points = [(n, value(by_length.get(n, Entry()))) for n in lengths]
        points = [(n, y) for n, y in points if y]
        if not points:
            continue
        ours = name in OURS
        axes.plot(
            *zip(*points, strict=True),
            label=name,
            color=f"C{index % 10}",
            marker="o" if ours else ".",
            linewidth=2.4 if ours else 1.2,
            linestyle=":" if name == LIMIT else "-",
            zorder=3 if ours else 2,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=0 if len(lengths) < 8 else 45)
    axes.yaxis.set_major_locator(LogLocator(base=10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.set_xlabel("sequence length n")
    axes.set_ylabel(label)
    axes.grid(which="major", alpha=0.3)
    figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    return save_figure(figure, path)
