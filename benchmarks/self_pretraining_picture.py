"""What self-pretraining changed, attention by attention: tested from scratch, and after it, with the preset `mini`.

    python benchmarks/self_pretraining_picture.py --out results/lra

Reads the records that lra_results.py published, and draws `self-pretrained/change`. A task is drawn by the attentions
that have both; Pathfinder has none, whose recipe self-pretrains always.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from nystromformer.records import RESULTS, read_records
from nystromformer.report.figures import STYLE, Drawing, colors_of
from nystromformer.report.table import exact_first

PARTS = {"mini": "from scratch", "self-pretrained": "self-pretrained"}
"""Folders, and what they hold."""
PICTURE = "self-pretrained/change"
TASKS = {"listops": "ListOps", "text": "Text", "retrieval": "Retrieval", "image": "Image"}
ROW = 0.3
"""Inches of an attention."""

Result = dict[str, Any]


def results(out: Path, part: str, task: str) -> dict[str, Result]:
    """By attention, what was tested."""
    folder = out / part / task
    records = read_records(*sorted(folder.glob("*/seed-0"))) if folder.exists() else []
    return {r["config"]["attention"]: r for r in records if r["metric"] == RESULTS["lra"]}


def standard_error(result: Result) -> float:
    """Of a score on so many test examples."""
    return math.sqrt(result["value"] * (1 - result["value"]) / result["test_examples"])


def draw_row(drawing: Drawing, axes: Axes, place: int, attention: str, pair: list[Result], color: str) -> None:
    """Two points with pale bars, their standard errors, and an arrow where they differ by more than one of these."""
    for result, said, face in zip(pair, PARTS.values(), ("none", color), strict=True):
        value, error = result["value"], standard_error(result)
        axes.plot([value - error, value + error], [place, place], color=color, linewidth=5, alpha=0.25)
        point = [(value, place, f"{attention}, {said}: {value:.2%}")]
        drawing.line(axes, point, None, color=color, markerfacecolor=face, marker="o", zorder=3)
    before, after = (result["value"] for result in pair)
    if abs(after - before) > max(map(standard_error, pair)):
        arrow = {"arrowstyle": "-|>", "color": color, "shrinkA": 4, "shrinkB": 3}
        axes.annotate("", (after, place), (before, place), arrowprops=arrow)


def tasks_with_both(out: Path) -> dict[str, dict[str, list[Result]]]:
    """By task and attention, what was tested from scratch and after self-pretraining."""
    found = {}
    for task in TASKS:
        before, after = (results(out, part, task) for part in PARTS)
        names = exact_first(name for name in sorted(before) if name in after)
        found[task] = {name: [before[name], after[name]] for name in names}
    return {task: both for task, both in found.items() if both}


@rc_context(STYLE)
def draw_change(out: Path) -> Drawing | None:
    """A panel for each task, a row for each attention; None where nothing has both."""
    tasks = tasks_with_both(out)
    if not tasks:
        return None
    colors = colors_of(exact_first(sorted(name for both in tasks.values() for name in both)))
    drawing, panels = Drawing.panels(len(tasks))
    drawing.figure.set_figheight(sum(ROW * len(both) + 1 for both in tasks.values()))
    drawing.figure.axes[0].get_gridspec().set_height_ratios([len(both) + 1 for both in tasks.values()])
    for axes, (task, both) in zip(panels, tasks.items(), strict=True):
        for place, (attention, pair) in enumerate(both.items()):
            draw_row(drawing, axes, place, attention, pair, colors[attention])
        _, after = pair
        axes.axvline(after["majority"], color="0.5", linestyle=":", linewidth=1, label="most frequent class")
        axes.set_yticks(range(len(both)), both)
        axes.set_ylim(len(both) - 0.5, -0.5)
        axes.set_title(TASKS[task], fontsize=11, loc="left")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.grid(axis="x", alpha=0.3)
    for said, face in zip(PARTS.values(), ("none", "0.3"), strict=True):
        panels[0].plot([], [], label=said, color="0.3", markerfacecolor=face, marker="o", linestyle="none")
    panels[-1].set_xlabel("test accuracy, and one standard error")
    drawing.legend(panels[0], 3)
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("results/lra"), help="where the records are, and the picture comes to"
    )
    options = parser.parse_args()
    drawing = draw_change(options.out)
    if drawing is None:
        parser.error(f"{options.out}: no task and attention has both; run lra_results.py first.")
    drawing.save(options.out / PICTURE)


if __name__ == "__main__":
    main()
