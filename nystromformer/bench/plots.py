"""Time and memory against length, both axes logarithmic, as PNG and SVG."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import FuncFormatter, LogLocator

from nystromformer.bench.figures import save_figure
from nystromformer.bench.table import LIMIT, Cell, Cells, columns

OURS = ("nystrom-64", "nystrom-32", "nystrom", "nystrom-local")


def draw_plots(table: Cells, folder: Path) -> list[Path]:
    """Write `time.{png,svg}` and `memory.{png,svg}`; returns their paths."""
    return [
        path
        for name, label, value in (
            ("time", "time of one call (ms)", lambda cell: None if cell.seconds is None else cell.seconds * 1e3),
            ("memory", "peak memory of one call (MB)", lambda cell: None if cell.bytes is None else cell.bytes / 1e6),
        )
        for path in _draw(table, folder / name, label, value)
    ]


def _draw(table: Cells, path: Path, label: str, value) -> list[Path]:
    figure, axes = pyplot.subplots(figsize=(6.0, 4.9), layout="constrained")
    lengths = columns(table)
    for index, (name, by_length) in enumerate(table.items()):
        points = [(n, value(by_length.get(n, Cell()))) for n in lengths]
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
