"""Training at a length that matters: slides of thousands of tiles, exact and Nyström attention given the same time."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from nystromformer.data.slides import Slide, draw_slide
from nystromformer.models.mil import TransMIL
from nystromformer.records import Recorder
from nystromformer.report.slide_map import draw_slide_map
from nystromformer.training.slides import LANDMARKS, SlideTraining, evaluate, small_transmil, tile_weights

TRAINING, HELD_OUT = range(2)  # parts of the data; no slide is in both
SHIFT = 16.0
"""How far planted tiles lie from others, in standard deviations of a feature: far, so that few steps suffice. With 8 a
run of 100 steps stayed at chance; with 16 and 120 both seeds that were tried learned."""
BATCH = 4
PICTURE = "slide.png"
EXACT, NYSTROM = "standard", f"nystrom-{LANDMARKS}"


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
