"""Where the time of a Long Range Arena training step goes: the training loop itself, as `nystromformer lra` runs it.

    OMP_NUM_THREADS=1 python benchmarks/lra_profile.py --out results/lra/profile

Processor time of one thread, so that other work on the machine changes little. Random tokens with each task's lengths,
the paper's sizes and batches of 32; a log entry every ten steps, as often as a short run writes one. Dropout is counted
in the forward pass alone. What is neither a part of the model nor named here is the Trainer's own.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers.trainer_callback import CallbackHandler

from nystromformer.data.lra import TASKS
from nystromformer.data.lra.examples import Examples, Sequences, Splits
from nystromformer.files import write_text
from nystromformer.models.encoder import Dropout
from nystromformer.models.lra import NystromformerForLongRangeArena
from nystromformer.records import Recorder, new_job_folder
from nystromformer.report.table import Table
from nystromformer.training.lra import Legacy, LraCell
from nystromformer.training.shared.callbacks import Curves, Record, ShowProgress
from nystromformer.training.shared.recipes import LRA_RECIPES
from nystromformer.training.trainer import cost

BATCH, WARM_UP = 32, 3
PARTS = ("data", "dropout", "forward", "backward", "optimizer", "callbacks and logging", "rest")
LENGTHS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "listops": lambda rng, count: rng.integers(500, 2_000, count),
    "text": lambda rng, count: np.clip(np.exp(rng.normal(6.9, 0.65, count)), 100, 4_000).astype(int),
    "image": lambda rng, count: np.full(count, 1_024),
}
"""As they are in the tasks' training parts, roughly: means of 1,250, 1,200 and 1,024 tokens."""


class Shares:
    """Processor time by part. A part inside another is not counted there."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.open: list[str] = []
        self.mark = time.process_time()

    def switch(self) -> None:
        now = time.process_time()
        self.seconds[self.open[-1] if self.open else "rest"] += now - self.mark
        self.mark = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.switch()
        self.open.append(name)
        try:
            yield
        finally:
            self.switch()
            self.open.pop()

    def counted(self, name: str, function: Callable) -> Callable:
        @wraps(function)
        def counting(*arguments: Any, **named: Any) -> Any:
            with self.part(name):
                return function(*arguments, **named)

        return counting


def splits(task: str, count: int) -> Splits:
    rng = np.random.default_rng(0)
    values = [rng.integers(0, 16, length).astype(np.uint8).tobytes() for length in LENGTHS[task](rng, count)]
    examples = Examples((Sequences.of(values),), rng.integers(0, TASKS[task].classes, count))
    return Splits(examples, examples.choose(slice(2)), examples.choose(slice(2)))


def profile(task: str, attention: str, steps: int, folder: Path) -> tuple[dict[str, float], float]:
    """Seconds of a step by part, and tokens per second of processor time."""
    recipe = LRA_RECIPES["paper"][task].changed(steps=WARM_UP + steps, batch_size=BATCH)
    settings = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "logging_steps": 10}
    cell = LraCell(
        task=task, attention=attention, seed=0, preset="paper", recipe=recipe, legacy=Legacy(), settings=settings,
        dtype="float32",
    )  # fmt: skip
    data, shares = splits(task, BATCH * (WARM_UP + steps)), Shares()
    callbacks = [ShowProgress(task), Record(Recorder(folder, job="lra-profile", config={}, seed=0)), Curves(folder)]
    trainer = cell.trainer(data, cell.arguments(folder, "cpu", data), callbacks)

    def begin(step: Callable) -> Callable:
        def training_step(*arguments: Any, **named: Any) -> Any:
            if trainer.state.global_step == WARM_UP and not started:
                started.append(cost(trainer, data.train, BATCH)["tokens"])
                shares.switch()
                shares.seconds.clear()
            return step(*arguments, **named)

        return training_step

    started: list[int] = []
    with ExitStack() as stack:
        for name, owner, method in (
            ("data", Examples, "batch"),
            ("dropout", Dropout, "forward"),
            ("forward", NystromformerForLongRangeArena, "forward"),
            ("callbacks and logging", CallbackHandler, "call_event"),
            ("backward", trainer.accelerator, "backward"),
            ("optimizer", torch.optim.AdamW, "step"),
            ("optimizer", torch.optim.AdamW, "zero_grad"),
        ):
            stack.enter_context(patch.object(owner, method, shares.counted(name, getattr(owner, method))))
        stack.enter_context(patch.object(trainer, "training_step", begin(trainer.training_step)))
        trainer.train()
        shares.switch()
    tokens = cost(trainer, data.train, BATCH)["tokens"] - started[0]
    seconds = {part: shares.seconds.get(part, 0.0) / steps for part in PARTS}
    return seconds, tokens / steps / sum(seconds.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/lra-profile"))
    parser.add_argument("--tasks", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--attention", default="nystrom-64")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    new_job_folder(options.out)
    config = {"batch": BATCH, "attention": options.attention, "steps": options.steps}
    recorder, rows = Recorder(options.out, job="lra-profile", config=config, seed=0), []
    for task in options.tasks:
        with TemporaryDirectory() as folder:
            seconds, speed = profile(task, options.attention, options.steps, Path(folder))
        whole = sum(seconds.values())
        recorder.record("step", whole, unit="s", task=task, parts=seconds, tokens_per_second=speed)
        shares = [f"{100 * seconds[part] / whole:.1f} %" for part in PARTS]
        rows.append([task, f"{1e3 * whole:.0f} ms", *shares, f"{speed:,.0f}"])
    text = Table(["task", "step", *PARTS, "tokens/s"], rows).markdown() + "\n"
    write_text(options.out / "table.md", text)
    print(text)


if __name__ == "__main__":
    main()
