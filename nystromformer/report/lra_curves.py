"""Accuracy on the dev set while training on a task of Long Range Arena, with the paper's results as lines."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter, PercentFormatter

from nystromformer.bench.figures import save_figure
from nystromformer.published import LRA

Record = dict[str, object]


def draw_dev_accuracy(records: Iterable[Record], task: str, path: Path) -> list[Path]:
    """Write `path`.png and .svg: a curve for each attention and seed, what was tested as a dot at its step."""
    found = [r for r in records if r["job"] == "lra" and r["config"]["task"] == task]
    figure, axes = pyplot.subplots(figsize=(8, 4.6), layout="constrained")
    for number, attention in enumerate(dict.fromkeys(record["config"]["attention"] for record in found)):
        color = f"C{number}"
        for seed in dict.fromkeys(r["seed"] for r in found if r["config"]["attention"] == attention):
            run = [r for r in found if (r["config"]["attention"], r["seed"]) == (attention, seed)]
            points = [(r["step"], r["value"]) for r in run if r["metric"] == "dev_accuracy"]
            axes.plot(
                *zip(*points, strict=True), color=color, linewidth=1, alpha=0.7, label=f"{attention}, seed {seed}, dev"
            )
            for record in run:
                if record["metric"] == "test_accuracy":
                    label = f"{attention}, seed {seed}: test {100 * record['value']:.2f} %"
                    axes.plot(record["best_step"], record["value"], "o", color=color, label=label)
        published = LRA.get(attention.rsplit("-", 1)[0], LRA.get(attention, {})).get(task)
        if published is not None:
            label = f"{attention}, the paper's test: {published:.2f} %"
            axes.axhline(published / 100, color=color, linestyle="--", linewidth=1, label=label)
    axes.set(xlabel="steps", ylabel="accuracy")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    return save_figure(figure, path)
