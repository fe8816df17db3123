"""Accuracy on the dev set while training on a task of Long Range Arena, with the paper's results as lines."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter, PercentFormatter

from nystromformer.figures import save_figure
from nystromformer.paper import LRA, paper_row
from nystromformer.records import RESULTS
from nystromformer.report.lra_table import exact_first, with_published

DEV = "dev_accuracy"
Record = dict[str, object]


def draw_dev_accuracy(records: Iterable[Record], task: str, path: Path) -> list[Path]:
    """Write `path`.png and .svg: a curve for each attention and seed, what was tested as a dot at its step."""
    found = [r for r in records if r["job"] == "lra" and r["config"]["task"] == task]
    figure, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    for number, attention in enumerate(exact_first(r["config"]["attention"] for r in found if r["metric"] == DEV)):
        color, on_top = f"C{number}", 2 + 1 / (1 + number)  # what others are compared with must not be hidden
        runs = _runs_of(found, attention)
        tested = [r for run in runs for r in run if r["metric"] == RESULTS["lra"]]
        published = paper_row(LRA, attention).get(task)
        label = f"{attention}: {with_published([100 * r['value'] for r in tested], published)}"
        if len(runs) > 1:
            label += f", {len(runs)} seeds"
        for run in runs:
            points = [(r["step"], r["value"]) for r in run if r["metric"] == DEV]
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1, alpha=0.7, label=label, zorder=on_top)
            label = None  # one entry of the legend for all seeds
        for record in tested:
            axes.plot(record["best_step"], record["value"], "o", color=color)
        if published is not None:
            axes.axhline(published / 100, color=color, linestyle="--", linewidth=1)
    shares = {record["majority"] for record in found if "majority" in record}
    if len(shares) == 1:  # all were tested on the same examples
        axes.axhline(*shares, color="0.5", linestyle=":", linewidth=1, label="most frequent class")
    axes.set(xlabel="steps", ylabel="accuracy on the dev set")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3)
    title = "test in percent, at the dots\n(the paper's, dashed)"
    figure.legend(loc="outside right upper", frameon=False, fontsize=9, title=title, title_fontsize=9, alignment="left")
    return save_figure(figure, path)


def _runs_of(found: list[Record], attention: str) -> list[list[Record]]:
    """The records of an attention, seed by seed, as far as there are points to draw."""
    own = [record for record in found if record["config"]["attention"] == attention]
    evaluated = dict.fromkeys(record["seed"] for record in own if record["metric"] == DEV)
    return [[record for record in own if record["seed"] == seed] for seed in evaluated]
