"""Accuracies of pretraining runs against steps and against time: the paper's two figures, from records."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import EngFormatter, PercentFormatter

from nystromformer.records import read_records

ACCURACIES = {"dev_mlm_accuracy": "masked words", "dev_sop_accuracy": "sentence order"}
Point = dict[str, float]


@dataclass(frozen=True)
class Run:
    """The validation accuracies of one run, step by step."""

    label: str
    points: dict[str, list[Point]]
    """For each accuracy: its value, step, seconds and tokens."""


def read_run(folder: str | Path) -> Run:
    """Raises `ValueError` for a folder without the records of a pretraining run."""
    try:
        records = [record for record in read_records(folder) if record["job"] == "pretrain"]
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: holds no records of a run; give the --out folder of a pretraining run.") from error
    if not records:
        raise ValueError(f"{folder}: holds no records of a pretraining run.")
    config = records[0]["config"]
    start = "" if config["from"] is None else f", from {Path(config['from']).name}"
    points = {
        metric: [
            {name: record[name] for name in ("value", "step", "seconds", "tokens")}
            for record in records
            if record["metric"] == metric
        ]
        for metric in ACCURACIES
    }
    return Run(f"{config['attention']}{start}", points)


def read_runs(folders: Iterable[str | Path]) -> list[Run]:
    """Runs of different folders; labels that would be the same get the folder's name."""
    folders = list(folders)
    runs = [read_run(folder) for folder in folders]
    labels = [run.label for run in runs]
    return [
        run if labels.count(run.label) == 1 else Run(f"{run.label} ({Path(folder).name})", run.points)
        for run, folder in zip(runs, folders, strict=True)
    ]


def draw_curves(folders: Iterable[str | Path], out: Path) -> list[Path]:
    """Write `accuracy_steps.{png,svg}` and `accuracy_time.{png,svg}`, all runs in one figure; returns their paths."""
    runs = read_runs(folders)
    longest = max((point["seconds"] for run in runs for each in run.points.values() for point in each), default=0.0)
    unit, seconds = next(
        ((unit, size) for unit, size in (("hours", 3600), ("minutes", 60)) if longest > size), ("seconds", 1)
    )
    return [
        *_draw(runs, out / "accuracy_steps", "steps", lambda point: point["step"]),
        *_draw(runs, out / "accuracy_time", f"{unit} of training", lambda point: point["seconds"] / seconds),
    ]


def _draw(runs: list[Run], path: Path, label: str, place: Callable[[Point], float]) -> list[Path]:
    figure, panels = pyplot.subplots(1, len(ACCURACIES), figsize=(10, 4.2), layout="constrained")
    for axes, (metric, title) in zip(panels, ACCURACIES.items(), strict=True):
        for run in runs:
            points = run.points[metric]
            if points:
                axes.plot([place(p) for p in points], [p["value"] for p in points], marker=".", label=run.label)
        axes.set_title(f"{title}, validation accuracy")
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=9)
    paths = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for each in paths:
        each.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(each, dpi=150)
    pyplot.close(figure)
    return paths
