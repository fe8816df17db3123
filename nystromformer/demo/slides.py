"""Training at a length that matters: slides of thousands of tiles, exact and Nyström attention given the same time.

A picture shows what was planted in a slide, and where the CLS token of each classifier looks.
"""

import io
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nystromformer.files import write_bytes
from nystromformer.models.mil import TransMIL
from nystromformer.records import Recorder
from nystromformer.training.slides import (
    LANDMARKS,
    Slide,
    SlideTraining,
    draw_slide,
    evaluate,
    small_transmil,
    tile_weights,
)

TRAINING, HELD_OUT = range(2)  # parts of the data; no slide is in both
SHIFT = 16.0
"""How far planted tiles lie from others, in standard deviations of a feature: far, so that few steps suffice. With 8 a
run of 100 steps stayed at chance; with 16 and 120 both seeds that were tried learned."""
BATCH = 4
PICTURE = "slide.png"
EXACT, NYSTROM = "standard", f"nystrom-{LANDMARKS}"

TILE_COLORS = ListedColormap(["#ded7e3", "#4f86c6", "#d7263d"])
OUTLINE = "#168f83"
ZOOM = 0.11
"""Half the width of what is enlarged, as a share of the slide."""


@dataclass
class Racer:
    """A model in training, with the seconds of each of its steps."""

    training: SlideTraining
    batches: Iterator[list[Slide]]
    seconds: list[float] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return len(self.seconds) >= self.training.steps

    def step(self) -> None:
        slides = next(self.batches)
        started = time.perf_counter()
        self.training.step(slides)
        self.seconds.append(time.perf_counter() - started)


def train_on_slides(
    out: Path,
    *,
    tiles: int,
    steps: int,
    slides: int,
    held_out: int,
    seed: int,
    recorder: Recorder,
    advance: Callable[[str], None],
) -> None:
    """Train both, measure what each reached in the same time, and draw where it looks."""
    pool = [draw(seed, TRAINING, index, tiles, advance) for index in range(slides)]
    tests = [draw(seed, HELD_OUT, index, tiles, advance) for index in range(held_out)]
    racers = race(pool, steps, tiles, seed, advance)
    maps = {}
    for name, racer in racers.items():
        advance(f"what {name} learned")
        model, seconds = racer.training.model.eval(), racer.seconds
        found = evaluate(model, tests)
        shared = {"attention": name, "tiles": tiles, "batch": BATCH, "steps": len(seconds)}
        recorder.record(
            "step", statistics.median(seconds), unit="s", minimum=min(seconds), maximum=max(seconds), **shared
        )
        for metric in ("accuracy", "tile_precision"):
            recorder.record(metric, found[metric], slides=held_out, trained=sum(seconds), **shared)
        maps[name] = tile_weights(model, tests[0])
    draw_maps(out, tests[0], {name: (maps[name], racers[name]) for name in (NYSTROM, EXACT)}, recorder)


def draw(seed: int, part: int, index: int, tiles: int, advance: Callable[[str], None]) -> Slide:
    advance("drawing slides")
    return draw_slide(seed, part, index, (tiles, tiles), SHIFT)


def race(pool: list[Slide], steps: int, tiles: int, seed: int, advance: Callable[[str], None]) -> dict[str, Racer]:
    """Nyström attention takes `steps` steps, and exact attention as many as fit into the same time.

    Their steps take turns, so that a disturbance of the machine is one of both.
    """
    landmarks = {NYSTROM: LANDMARKS, EXACT: tiles + 1}  # as many as tokens: exact
    trial = {name: trial_step(small_transmil(count), pool[:BATCH], advance) for name, count in landmarks.items()}
    counts = {NYSTROM: steps, EXACT: max(2, round(steps * trial[NYSTROM] / trial[EXACT]))}
    racers = {}
    for name, count in landmarks.items():
        torch.manual_seed(seed)
        racers[name] = Racer(SlideTraining(small_transmil(count), counts[name]), batches_of(pool, seed))
    while running := {name: racer for name, racer in racers.items() if not racer.is_done}:
        name = min(running, key=lambda name: sum(running[name].seconds))
        if name == NYSTROM:
            advance(f"training, {counts[NYSTROM]:,} steps and {counts[EXACT]:,} of exact attention")
        running[name].step()
    return racers


def trial_step(model: TransMIL, slides: list[Slide], advance: Callable[[str], None]) -> float:
    """The seconds of a second step."""
    advance("a step of each, to divide the time")
    racer = Racer(SlideTraining(model, 2), iter([slides, slides]))
    racer.step()
    racer.step()
    return min(racer.seconds)


def batches_of(pool: list[Slide], seed: int) -> Iterator[list[Slide]]:
    """Batches without end; all slides are seen before one is seen again."""
    order = np.random.default_rng(seed)
    while True:
        chosen = order.permutation(len(pool))
        for first in range(0, len(pool) - BATCH + 1, BATCH):
            yield [pool[index] for index in chosen[first : first + BATCH]]


def draw_maps(out: Path, slide: Slide, maps: dict[str, tuple[np.ndarray, Racer]], recorder: Recorder) -> None:
    names = {NYSTROM: "Nyström", EXACT: "exact"}
    titled = {
        f"{names[name]} attention, {len(racer.seconds):,} steps": weights for name, (weights, racer) in maps.items()
    }
    draw_slide_map(out / PICTURE, slide.cells.numpy(), slide.planted, slide.artifacts, titled)
    caption = (
        f"A slide of {len(slide.planted):,} tiles that neither model was trained on: what was planted, and where the "
        "CLS token of each looks after the same time of training"
    )
    recorder.record("picture", PICTURE, caption=caption)


def draw_slide_map(
    path: Path, cells: np.ndarray, planted: np.ndarray, artifacts: np.ndarray, maps: dict[str, np.ndarray]
) -> None:
    """A PNG: what was planted, the weights of each of `maps` over the whole slide, and the first around one cluster.

    Args:
        cells: (n, 2), row and column of each tile.
        planted, artifacts: (n,), True for tiles of that kind.
        maps: by title, one weight per tile; all share their colors.
    """
    count = len(cells)
    relative = {title: np.maximum(weights * count, 1) for title, weights in maps.items()}  # 1: all get the same
    scale = LogNorm(1, max(2.0, *(weights.max() for weights in relative.values())))
    figure = Figure(figsize=(4.2 * (len(maps) + 2), 4.6), layout="constrained")
    first, *panels, last = figure.subplots(1, len(maps) + 2)

    kinds = np.where(planted, 2, np.where(artifacts, 1, 0))
    first.imshow(on_grid(cells, kinds), cmap=TILE_COLORS, vmin=0, vmax=2, interpolation="nearest")
    first.set_title(f"{planted.sum()} planted tiles among {count:,}")
    first.legend(
        handles=[Rectangle((0, 0), 1, 1, color=TILE_COLORS(kind)) for kind in (2, 1)],
        labels=["planted: they make the slide positive", "artifacts: as unusual, in all slides"],
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        frameon=False,
    )
    for panel, (title, weights) in zip(panels, relative.items(), strict=True):
        _draw_weights(panel, cells, weights, scale, title)
    _draw_weights(last, cells, next(iter(relative.values())), scale, "around one cluster, outline: planted")
    last.contour(np.nan_to_num(on_grid(cells, planted)), levels=[0.5], colors="#4ad6c8", linewidths=1.5)
    row, column = cells[planted][np.argmax(next(iter(maps.values()))[planted])]
    reach = ZOOM * cells.max()
    last.set(xlim=(column - reach, column + reach), ylim=(row + reach, row - reach))
    bounds = (column - reach, row - reach, 2 * reach, 2 * reach)
    panels[0].indicate_inset(bounds=bounds, edgecolor=OUTLINE, alpha=1, linewidth=1.5)
    for panel in (first, *panels, last):
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(panel is last)
    colors = ScalarMappable(scale, "inferno")
    figure.colorbar(colors, ax=[*panels, last], label="weight ÷ mean weight", shrink=0.85)
    content = io.BytesIO()
    figure.savefig(content, dpi=100)
    write_bytes(path, content.getvalue())


def _draw_weights(panel: Axes, cells: np.ndarray, weights: np.ndarray, scale: LogNorm, title: str) -> None:
    panel.imshow(on_grid(cells, weights), cmap="inferno", norm=scale, interpolation="nearest")
    panel.set_title(title)


def on_grid(cells: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One value per tile as a picture of the slide, nan where there is no tissue.

    >>> on_grid(np.array([[0, 0], [1, 1]]), np.array([3, 4]))
    array([[ 3., nan],
           [nan,  4.]])
    """
    rows, columns = cells.T
    picture = np.full((rows.max() + 1, columns.max() + 1), np.nan)
    picture[rows, columns] = values
    return picture
