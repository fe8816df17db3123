"""Accuracies of pretraining runs against steps and against time: the paper's two figures, from records."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter

from nystromformer.figures import save_figure

ACCURACIES = {"dev_mlm_accuracy": "masked words", "dev_sop_accuracy": "sentence order"}
CHANCE = {"dev_sop_accuracy": 0.5}
TELLING = ("size", "steps", "batch_size", "max_length", "learning_rate", "seed")
"""Settings that tell runs of one attention from one another, where they differ."""
UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}
Record = dict[str, object]
Point = dict[str, float]


@dataclass(frozen=True)
class Run:
    """The validation accuracies of one run, step by step."""

    label: str
    points: dict[str, list[Point]]
    """For each accuracy: its value, step, seconds and tokens."""


def runs_of(records: Iterable[Record]) -> list[Run]:
    """The pretraining runs among some records, told apart by their configuration."""
    by_config: dict[str, list[Record]] = {}
    for record in records:
        if record["job"] == "pretrain" and record["metric"] in ACCURACIES:
            by_config.setdefault(json.dumps(record["config"], sort_keys=True), []).append(record)
    labels = _labels([found[0]["config"] for found in by_config.values()])
    return [Run(label, _points(found)) for label, found in zip(labels, by_config.values(), strict=True)]


def _labels(configs: list[Record]) -> list[str]:
    names = [config["attention"] + _start(config, configs) for config in configs]
    labels = []
    for name, config in zip(names, configs, strict=True):
        alike = [other for other_name, other in zip(names, configs, strict=True) if other_name == name]
        telling = [each for each in TELLING if len({str(other.get(each)) for other in alike}) > 1]
        labels.append(", ".join([name, *(f"{each.replace('_', ' ')} {config.get(each)}" for each in telling)]))
    return labels


def _start(config: Record, configs: list[Record]) -> str:
    """Where a run's weights come from; said of random ones only beside a run of the same attention that has others."""
    if config["from"] is not None:
        return f", from {Path(config['from']).name}"
    beside = any(other["from"] is not None and other["attention"] == config["attention"] for other in configs)
    return ", from scratch" if beside else ""


def _points(records: list[Record]) -> dict[str, list[Point]]:
    names = ("value", "step", "seconds", "tokens")
    return {
        metric: [{name: record[name] for name in names} for record in records if record["metric"] == metric]
        for metric in ACCURACIES
    }


def draw_curves(records: Iterable[Record], folder: Path) -> list[Path]:
    """Write `accuracy_steps.{png,svg}` and `accuracy_time.{png,svg}`, all runs in each figure; returns their paths."""
    runs = runs_of(records)
    longest = max((point["seconds"] for run in runs for points in run.points.values() for point in points), default=0.0)
    unit = next((unit for unit, seconds in UNITS.items() if longest > 2 * seconds), "seconds")
    return [
        *_draw(runs, folder / "accuracy_steps", "steps", lambda point: point["step"]),
        *_draw(runs, folder / "accuracy_time", f"{unit} of training", lambda point: point["seconds"] / UNITS[unit]),
    ]


def _draw(runs: list[Run], path: Path, label: str, place: Callable[[Point], float]) -> list[Path]:
    figure, panels = pyplot.subplots(1, len(ACCURACIES), figsize=(10, 4.2), layout="constrained")
    for axes, (metric, title) in zip(panels, ACCURACIES.items(), strict=True):
        for run in runs:
            points = run.points[metric]
            axes.plot([place(p) for p in points], [p["value"] for p in points], marker=".", label=run.label)
        if metric in CHANCE:
            _mark_chance(axes, CHANCE[metric])
        axes.set_title(f"{title}, validation accuracy")
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=9)
    return save_figure(figure, path)


def _mark_chance(axes: Axes, chance: float) -> None:
    """A line, and at least ten points around it: so noise does not look like a difference."""
    axes.axhline(chance, color="0.5", linestyle="--", linewidth=1, zorder=0)
    axes.annotate("chance", (1, chance), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="0.4")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, chance - 0.1), max(high, chance + 0.1))
