"""The figures there are, from records alone: Matplotlib's, whose points say their values where a pointer rests on them.

The same records give the same bytes. A drawing is a PNG for places that show nothing else, and an SVG whose ink is the
color of the text around it, so that one drawing serves light and dark pages.
"""

import io
import itertools
import json
import math
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, PercentFormatter

from nystromformer.files import write_bytes
from nystromformer.paper import LRA, paper_row
from nystromformer.records import RESULTS
from nystromformer.report.efficiency import (
    LIMIT,
    MAIN,
    TIME_BASELINE,
    Entries,
    Entry,
    crossing,
    measured_lengths,
    rounded,
)
from nystromformer.report.table import exact_first, is_ours, printable, with_published
from nystromformer.report.tables import last_part, lra_method, shared_parts

INK = "#1b2027"
STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10.5,
    "text.parse_math": False,  # a name with dollar signs is no formula
    "svg.fonttype": "none",  # words stay words: they can be found, read aloud and copied
}
KNOWN_COLORS = {"standard": "#808a94", "dense": "#8a6d3b", "nystrom-64": "#1f83b4", LIMIT: "#2f9e6e"}
"""What is in most figures looks the same in all of them: exact attention is gray, the paper's is blue."""
OTHER_COLORS = ("#d1622b", "#b05cc6", "#b58900", "#c94f7c", "#5b7fe0", "#00979d", "#d6443c", "#7a9e1f", "#9a6be0")
"""Can be told apart on white and on black; the markers of others than ours help."""
OTHER_MARKERS = "s^vDPX"
DEV_ACCURACY = "dev_accuracy"
PRETRAINING_ACCURACIES = {"dev_mlm_accuracy": "masked words", "dev_sop_accuracy": "sentence order"}
DISTILLATION_COSINE = "dev_cosine"
CHANCE = {"dev_sop_accuracy": 0.5}
TELLING = ("size", "steps", "batch_size", "max_length", "learning_rate", "seed")
"""Settings that tell pretraining runs of one attention from one another, where they differ."""
UNITS = {"hours": 3600, "minutes": 60, "seconds": 1}
LONGEST_LABEL = 64
WIDTH, HEIGHT = 5.2, 3.6
"""Of a panel, in inches."""
FORMATS: dict[str, dict[str, Any]] = {".png": {"dpi": 150}, ".svg": {"metadata": {"Date": None}, "transparent": True}}
SVG = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
Record = dict[str, Any]
Point = dict[str, float]


@dataclass
class Drawing:
    """A figure, and for each of its lines what the points say."""

    figure: Figure
    tips: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def panels(cls, number: int) -> tuple["Drawing", list[Axes]]:
        """One panel below the other, all as wide as a phone shows with words that can be read."""
        figure = Figure(figsize=(WIDTH, HEIGHT * number), layout="constrained")
        return cls(figure), list(figure.subplots(number, 1, squeeze=False)[:, 0])

    def line(self, axes: Axes, points: Iterable[tuple[float, float, str]], label: str | None, **style: Any) -> None:
        """A curve with a marker at each point (x, y, what it says); points that have no place are left out."""
        points = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
        if points:
            xs, ys, tips = zip(*points, strict=True)
            name = f"line-{len(self.tips)}"
            shown = None if label is None else _legend_entry(label)
            axes.plot(xs, ys, label=shown, gid=name, **{"marker": ".", **style})
            self.tips[name] = list(map(printable, tips))

    @rc_context(STYLE)
    def legend(self, axes: Axes, most_columns: int, title: str | None = None) -> None:
        """What the lines of a panel are, below all panels: in as many columns as the figure has room for, on several
        lines where a name alone is too wide. The figure grows by it."""
        handles, names = axes.get_legend_handles_labels()
        style: Any = {"loc": "outside lower center", "frameon": False, "fontsize": 9, "title_fontsize": 9}
        style |= {"handlelength": 1.6, "columnspacing": 1.2}
        whole = [(columns, LONGEST_LABEL + 2) for columns in range(most_columns, 0, -1)]
        for columns, letters in (*whole, (1, LONGEST_LABEL // 2), (1, LONGEST_LABEL // 4)) if handles else ():
            shown = [textwrap.fill(name, letters) for name in names]
            legend = self.figure.legend(handles, shown, title=title, ncols=columns, **style)
            box = legend.get_window_extent()
            if box.width <= self.figure.bbox.width or letters == LONGEST_LABEL // 4:
                self.figure.set_figheight(self.figure.get_figheight() + box.height / self.figure.dpi)
                return
            legend.remove()

    def render(self, salt: str) -> dict[str, bytes]:
        """PNG and SVG by suffix."""
        content = {}
        with rc_context(STYLE | {"svg.hashsalt": salt}):
            for suffix, options in FORMATS.items():
                file = io.BytesIO()
                self.figure.savefig(file, format=suffix[1:], **options)
                content[suffix] = file.getvalue()
        return content | {".svg": _with_tips(content[".svg"], self.tips, salt)}

    def save(self, path: Path) -> list[Path]:
        """Write `path`.png and `path`.svg; returns both paths."""
        content = self.render(path.name)
        for suffix, written in content.items():
            write_bytes(path.with_suffix(suffix), written)
        return [path.with_suffix(suffix) for suffix in content]


def _legend_entry(label: str) -> str:
    """Short enough to leave room for the figure, and not left out, as one that starts with an underscore would be."""
    label = label if len(label) <= LONGEST_LABEL else f"{label[:LONGEST_LABEL]}…"
    return f"\u200b{label}" if label.startswith("_") else label


def _with_tips(svg: bytes, tips: dict[str, list[str]], salt: str) -> bytes:
    """Matplotlib's SVG with a title in each marker, ink of the surrounding color, and names that no other one has."""
    root = ElementTree.fromstring(svg)
    parents = {child: parent for parent in root.iter() for child in parent}
    for name, texts in tips.items():
        line = next(element for element in root.iter() if element.get("id") == name)
        for marker, text in zip(line.iter(f"{{{SVG}}}use"), texts, strict=True):
            marker.set("class", "point")
            ElementTree.SubElement(marker, f"{{{SVG}}}title").text = text
    for element in list(root.iter()):
        if element.tag == f"{{{SVG}}}metadata":
            parents[element].remove(element)
        if "style" in element.attrib:
            element.set("style", element.attrib["style"].replace(INK, "currentColor"))
        for name in ("id", LINK, "clip-path"):
            if name in element.attrib:
                element.set(name, _renamed(element.attrib[name], salt))
    for name in ("width", "height"):  # the page decides; the view box keeps the shape
        root.attrib.pop(name, None)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", LINK[1:].partition("}")[0])
    return ElementTree.tostring(root, encoding="utf-8")


def _renamed(reference: str, salt: str) -> str:
    """
    >>> _renamed("url(#p1)", "time"), _renamed("#m2", "time"), _renamed("line-1", "time")
    ('url(#time-p1)', '#time-m2', 'time-line-1')
    """
    if "#" in reference:
        return reference.replace("#", f"#{salt}-", 1)
    return f"{salt}-{reference}"


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """
    >>> list(colors_of(["linear", "standard", "reformer-2"]).values())
    ['#d1622b', '#808a94', '#b05cc6']
    """
    others = itertools.cycle(OTHER_COLORS)
    return {name: KNOWN_COLORS.get(name) or next(others) for name in dict.fromkeys(names)}


def draw_efficiency(entries: Entries) -> dict[str, Drawing]:
    """`time` and `memory` against the length, as far as they were measured."""
    milliseconds = lambda entry: None if entry.seconds is None else entry.seconds * 1e3
    megabytes = lambda entry: None if entry.bytes is None else entry.bytes / 1e6
    time = _draw_efficiency(entries, "time of one call (ms)", "ms", milliseconds)
    if time.tips:
        _mark_crossing(time.figure.axes[0], crossing(entries))
        _mark_spread(time.figure.axes[0], entries)
    memory = _draw_efficiency(entries, "peak memory of one call (MB)", "MB", megabytes)
    drawings = {"time": time, "memory": memory}
    return {name: drawing for name, drawing in drawings.items() if drawing.tips}


def _mark_crossing(axes: Axes, length: float | None) -> None:
    """Where our attention becomes faster than exact attention, if that is between two lengths that were measured."""
    if length is not None:
        axes.axvline(length, color="0.5", linestyle="--", linewidth=1, zorder=0)
        text = f" {MAIN} is faster\n from {rounded(length):,} tokens on"
        axes.annotate(
            text, (length, 1), xycoords=("data", "axes fraction"), ha="left", va="top", color="0.5", fontsize=9
        )


def _mark_spread(axes: Axes, entries: Entries) -> None:
    """A bar from the fastest to the slowest repeat."""
    for name, color in colors_of(entries).items():
        for length, entry in entries[name].items():
            if entry.minimum and entry.maximum and length > 0:
                low, high = 1e3 * entry.minimum, 1e3 * entry.maximum
                axes.plot([length, length], [low, high], color=color, linewidth=1, alpha=0.6, marker="_", markersize=5)


@rc_context(STYLE)
def _draw_efficiency(entries: Entries, label: str, unit: str, value: Callable[[Entry], float | None]) -> Drawing:
    drawing, (axes,) = Drawing.panels(1)
    lengths = measured_lengths(entries)
    colors = colors_of(entries)
    markers = itertools.cycle(OTHER_MARKERS)
    for name, by_length in entries.items():
        found = [(n, value(by_length[n])) for n in lengths if n in by_length]
        points = [(n, y, f"{name}, n = {n:,}: {y:,.4g} {unit}") for n, y in found if n > 0 and y and y > 0]
        ours = is_ours(name)
        drawing.line(
            axes,
            points,
            f"{name} (exact)" if name == TIME_BASELINE else name,
            color=colors[name],
            marker="o" if ours else "." if name == LIMIT else next(markers),
            markersize=6 if ours else 4,
            linewidth=2.4 if ours else 1.2,
            linestyle=":" if name == LIMIT else "-",
            zorder=3 if ours else 2,
        )
    if not drawing.tips:
        return drawing
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=0 if len(lengths) < 8 else 45)
    axes.yaxis.set_major_locator(LogLocator(base=10))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.set(xlabel="sequence length n", ylabel=label)
    axes.grid(which="major", alpha=0.3)
    drawing.legend(axes, 3)
    return drawing


@rc_context(STYLE)
def draw_dev_accuracy(records: Iterable[Record], task: str) -> Drawing:
    """Accuracy on a task of Long Range Arena while training: a curve for each attention and seed, what was tested as a
    dot at its step, and the paper's results as lines, unless the data is another."""
    found = [r for r in records if r["job"] == "lra" and r["config"]["task"] == task]
    drawing, (axes,) = Drawing.panels(1)
    shared = shared_parts(found).get(task, set())
    evaluated = [record for record in found if record["metric"] == DEV_ACCURACY]
    colors = colors_of(exact_first(lra_method(record["config"], shared) for record in evaluated))
    dashed = ""
    for place, (method, color) in enumerate(colors.items()):
        style = {"color": color, "zorder": 2 + 1 / (1 + place)}  # the first is never hidden
        runs = _seeds_of([r for r in found if lra_method(r["config"], shared) == method])
        tested = [r for run in runs for r in run if r["metric"] == RESULTS["lra"]]
        config = runs[0][0]["config"]
        published = None if config.get("data_departures") else paper_row(LRA, config["attention"]).get(task)
        label: str | None = f"{method}: {with_published([100 * r['value'] for r in tested], published)}"
        if len(runs) > 1:
            label = f"{label}, {len(runs)} seeds"
        for run in runs:
            points = [(r["step"], r["value"], _tip(r, "dev set")) for r in run if r["metric"] == DEV_ACCURACY]
            drawing.line(axes, points, label, linewidth=1, alpha=0.7, markersize=4, **style)
            label = None  # one entry of the legend for all seeds
        for r in tested:
            drawing.line(axes, [(r["best_step"], r["value"], _tip(r, "test set"))], None, **style | {"marker": "o"})
        if published is not None:
            axes.axhline(published / 100, color=color, linestyle="--", linewidth=1)
            dashed = " (the paper's, dashed)"
    shares = {record["majority"] for record in found if "majority" in record}
    if len(shares) == 1:  # all were tested on the same examples
        axes.axhline(*shares, color="0.5", linestyle=":", linewidth=1, label="most frequent class")
    axes.set(xlabel="steps", ylabel="accuracy on the dev set")
    count_steps_and_percent(axes)
    drawing.legend(axes, 2, title=f"test in percent, at the dots{dashed}")
    return drawing


def _tip(record: Record, part: str) -> str:
    where = f"{lra_method(record['config'])}, seed {record['seed']}, step {record.get('best_step', record['step']):,}"
    return f"{where}: {record['value']:.2%} on the {part}"


def _seeds_of(own: list[Record]) -> list[list[Record]]:
    """The records of a method, seed by seed, as far as there are points to draw."""
    evaluated = dict.fromkeys(record["seed"] for record in own if record["metric"] == DEV_ACCURACY)
    return [[record for record in own if record["seed"] == seed] for seed in evaluated]


@dataclass(frozen=True)
class PretrainingRun:
    """The validation accuracies of one run, step by step."""

    label: str
    points: dict[str, list[Point]]
    """For each accuracy: its value, step, seconds and tokens."""


def pretraining_runs(records: Iterable[Record]) -> list[PretrainingRun]:
    """The pretraining runs among some records, told apart by their configuration."""
    by_config: dict[str, list[Record]] = {}
    for record in records:
        if record["job"] == "pretrain" and record["metric"] in PRETRAINING_ACCURACIES:
            by_config.setdefault(json.dumps(record["config"], sort_keys=True), []).append(record)
    labels = _labels([found[0]["config"] for found in by_config.values()])
    return [PretrainingRun(label, _points(found)) for label, found in zip(labels, by_config.values(), strict=True)]


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
        return f", from {last_part(config['from'])}"
    beside = any(other["from"] is not None and other["attention"] == config["attention"] for other in configs)
    return ", from scratch" if beside else ""


def _points(records: list[Record]) -> dict[str, list[Point]]:
    names = ("value", "step", "seconds", "tokens")
    return {
        metric: [{name: record[name] for name in names} for record in records if record["metric"] == metric]
        for metric in PRETRAINING_ACCURACIES
    }


def draw_pretraining(records: Iterable[Record]) -> dict[str, Drawing]:
    """`accuracy_steps` and `accuracy_time`, the paper's two figures, with all runs in each."""
    runs = pretraining_runs(records)
    longest = max((point["seconds"] for run in runs for points in run.points.values() for point in points), default=0.0)
    unit = next((unit for unit, seconds in UNITS.items() if longest > 2 * seconds), "seconds")
    return {
        "accuracy_steps": _draw_pretraining(runs, "steps", lambda point: point["step"]),
        "accuracy_time": _draw_pretraining(runs, f"{unit} of training", lambda point: point["seconds"] / UNITS[unit]),
    }


@rc_context(STYLE)
def _draw_pretraining(runs: Sequence[PretrainingRun], label: str, place: Callable[[Point], float]) -> Drawing:
    drawing, panels = Drawing.panels(len(PRETRAINING_ACCURACIES))
    colors = colors_of(run.label for run in runs)
    for axes, (metric, title) in zip(panels, PRETRAINING_ACCURACIES.items(), strict=True):
        for run in runs:
            points = [
                (place(p), p["value"], f"{run.label}, {place(p):,.4g} {label}: {p['value']:.2%}")
                for p in run.points[metric]
            ]
            drawing.line(axes, points, run.label, color=colors[run.label])
        if metric in CHANCE:
            _mark_chance(axes, CHANCE[metric])
        axes.set_title(f"{title}, validation accuracy", fontsize=11)
        count_steps_and_percent(axes)
    panels[-1].set_xlabel(label)
    drawing.legend(panels[0], 2)
    return drawing


@rc_context(STYLE)
def draw_distillation(records: Iterable[Record]) -> dict[str, Drawing]:
    """`cosine`: how closely each run followed its teacher on held-out text, against the time of one core."""
    runs: dict[str, list[Record]] = {}
    for record in records:
        if record["job"] == "distill" and record["metric"] == DISTILLATION_COSINE:
            runs.setdefault(json.dumps(record["config"], sort_keys=True), []).append(record)
    drawing, (axes,) = Drawing.panels(1)
    configs = [found[0]["config"] for found in runs.values()]
    labels = [f"{c['attention']}, {c['max_length']:,} tokens, stages {' + '.join(c['stages'])}" for c in configs]
    colors = colors_of(labels)
    for label, found in zip(labels, runs.values(), strict=True):
        points = [
            (r["core_seconds"] / 60, r["value"], f"{label}, step {r['step']:,}: cosine {r['value']:.4f}") for r in found
        ]
        drawing.line(axes, points, label, color=colors[label])
    axes.set(xlabel="minutes of one core", ylabel="cosine to exact attention, held-out text")
    axes.grid(alpha=0.3)
    drawing.legend(axes, 2)
    return {"cosine": drawing}


def count_steps_and_percent(axes: Axes) -> None:
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3)


def _mark_chance(axes: Axes, chance: float) -> None:
    """A line, and at least ten points around it: so noise does not look like a difference."""
    axes.axhline(chance, color="0.5", linestyle="--", linewidth=1, zorder=0)
    axes.annotate("chance", (1, chance), xycoords=("axes fraction", "data"), ha="right", va="bottom", color="0.5")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, chance - 0.1), max(high, chance + 0.1))
