"""Train a TransMIL-style classifier of slides, then draw where its CLS token looks on a slide of 50,000 tiles.

    python examples/transmil.py --out runs/transmil

The model is `nystromformer.models.mil.TransMIL`. Which tiles decided is read off the CLS token's row of attention
weights, in O(n·m): the n×n matrices of 50,000 tiles and 4 heads would take 40 GB. The slides are synthetic
(`nystromformer.training.slides`), so that the tiles which ought to light up are known.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save_file

from nystromformer.checks import check_at_least
from nystromformer.demo.slides import draw_slide_map
from nystromformer.models.mil import TransMIL
from nystromformer.records import Recorder, new_job_folder, write_config
from nystromformer.training.slides import Slide, SlideTraining, draw_slide, evaluate, small_transmil, tile_weights

TRAINING, HELD_OUT, LARGE, PICTURE = range(4)  # parts of the data; no slide is in two of them
SPREAD = 5  # the largest slide of a part has this many times the tiles of the smallest
GROUP = 8  # batches of training slides that are drawn together


@dataclass(frozen=True, kw_only=True)
class Options:
    """All that a run depends on. Checked when made."""

    seed: int = 0
    bags: int = 1200
    """Slides to train on; each is seen once."""
    learning_rate: float = 3e-3
    batch: int = 8
    training_tiles: int = 5000
    """Tiles of the largest slide to train and to measure the accuracy on."""
    tiles: int = 50_000
    """Tiles of the slide to draw, and the most of the large slides that accuracy and map are measured on."""
    shift: float = 6.0
    """How far planted tiles lie from others, in standard deviations of a feature."""
    held_out: int = 200
    """Slides to measure on of the sizes that were trained on."""
    large: int = 20
    """Slides to measure on that are larger."""

    def __post_init__(self) -> None:
        check_at_least("seed", self.seed, 0)
        check_at_least("bags", self.bags, 1)
        check_at_least("batch", self.batch, 1)
        check_at_least("held_out", self.held_out, 2, "an AUC needs a positive and a negative slide")
        check_at_least("large", self.large, 2, "an AUC needs a positive and a negative slide")
        check_at_least("training_tiles", self.training_tiles, 500, "smaller slides have no room for clusters")
        check_at_least("tiles", self.tiles, 500, "smaller slides have no room for clusters")

    def slide(self, part: int, index: int) -> Slide:
        most = self.training_tiles if part in (TRAINING, HELD_OUT) else self.tiles
        fewest = most if part == PICTURE else most // SPREAD
        return draw_slide(self.seed, part, index, (fewest, most), self.shift)


def train(options: Options, recorder: Recorder, bar: Progress) -> TransMIL:
    """A model trained on slides that are drawn as they are needed."""
    torch.manual_seed(options.seed)
    steps = math.ceil(options.bags / options.batch)
    training = SlideTraining(small_transmil(), steps, options.learning_rate)
    task, started, tenth = bar.add_task("training", total=steps), time.monotonic(), max(steps // 10, 1)
    for step, slides in enumerate(training_batches(options), start=1):
        training.step(slides)
        bar.update(task, advance=1)
        if step % tenth == 0:
            recent = float(np.mean(training.losses[-tenth:]))
            left = (time.monotonic() - started) / step * (steps - step)
            recorder.record("training_loss", recent, step=step)
            bar.console.print(f"batch {step:,} of {steps:,}: loss {recent:.3f}, {left:.0f} s left", highlight=False)
    return training.model.eval()


def training_batches(options: Options) -> Iterator[list[Slide]]:
    """Slides of like length share a batch, as far as some that are drawn together allow, so that little is padding."""
    together = GROUP * options.batch
    for first in range(0, options.bags, together):
        slides = [options.slide(TRAINING, index) for index in range(first, min(first + together, options.bags))]
        slides.sort(key=lambda slide: len(slide.features))
        for start in range(0, len(slides), options.batch):
            yield slides[start : start + options.batch]


def run(options: Options, out: Path) -> None:
    """Train, measure and draw, into the folder `out`."""
    write_config(out, asdict(options))
    recorder = Recorder(out, job="transmil", config=asdict(options), seed=options.seed)
    with progress_bar() as bar:
        wall, processor = time.monotonic(), time.process_time()
        model = train(options, recorder, bar)
        wall, processor = time.monotonic() - wall, time.process_time() - processor
        recorder.record("training_time", wall, unit="s", processor_time=processor)
        save_file(model.state_dict(), out / "model.safetensors")
        print(f"trained on {options.bags:,} slides in {wall:.0f} s ({processor:.0f} s of processor time)")

        for part, name, count in ((HELD_OUT, "held-out", options.held_out), (LARGE, "large", options.large)):
            slides = (options.slide(part, index) for index in range(count))
            found = evaluate(model, bar.track(slides, total=count, description=f"{name} slides"))
            for metric, value in found.items():
                recorder.record(metric, value, part=name, slides=count)
            print(
                f"{count} {name} slides: accuracy {found['accuracy']:.1%}, AUC {found['auc']:.4f}; planted tiles: "
                f"AUC {found['tile_auc']:.4f} (worst slide {found['tile_auc_worst']:.4f}), "
                f"among the top k {found['tile_precision']:.1%} (worst slide {found['tile_precision_worst']:.1%})"
            )

    slide = options.slide(PICTURE, 0)
    started = time.monotonic()
    weights = tile_weights(model, slide)
    recorder.record("map_time", time.monotonic() - started, unit="s", tiles=options.tiles)
    print(f"map of {options.tiles:,} tiles in {time.monotonic() - started:.2f} s: {out / 'map.png'}")
    titles = {"attention of the CLS token": weights}
    draw_slide_map(out / "map.png", slide.cells.numpy(), slide.planted, slide.artifacts, titles)


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=Console(stderr=True))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/transmil"), help="folder to write (%(default)s)")
    parser.add_argument("--bags", type=int, default=Options.bags, help="slides to train on (%(default)s)")
    parser.add_argument("--tiles", type=int, default=Options.tiles, help="of the largest slide (%(default)s)")
    parser.add_argument("--held-out", type=int, default=Options.held_out, help="slides to measure on (%(default)s)")
    parser.add_argument("--large", type=int, default=Options.large, help="large slides to measure on (%(default)s)")
    parser.add_argument("--seed", type=int, default=Options.seed, help="seed of slides and weights (%(default)s)")
    given = vars(parser.parse_args(arguments))
    out = given.pop("out")
    try:
        options = Options(**given)
        new_job_folder(out)
    except (ValueError, TypeError, OSError) as error:
        parser.error(str(error))
    run(options, out)


if __name__ == "__main__":
    main()
