"""The parts of the demo, each through the same functions as the command of its own, and what they took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from nystromformer.bench.cases import available_peers, parse_lengths
from nystromformer.bench.run import BenchOptions, options_as_config, run_bench
from nystromformer.bench.show import progress_bar
from nystromformer.data.lra import TASKS, Splits
from nystromformer.data.lra.listops import ListOpsOptions
from nystromformer.errors import user_input
from nystromformer.jobs.demo_maps import write_maps
from nystromformer.jobs.demo_table import print_summary
from nystromformer.jobs.lra_grid import generate
from nystromformer.records import Recorder, read_records, write_config
from nystromformer.report.build import PAGE, write_report
from nystromformer.training.lra import Cell, arguments_of, prepare_cell, read_splits, run_cell
from nystromformer.training.lra_recipes import RECIPES, Legacy, Recipe

TASK = "listops"
TRAINED = ("standard", "nystrom-32")
MEASURED = ("standard", "dense", "nystrom-64")
SECONDS_A_LENGTH = 3.0
MIN_TOKENS, MAX_TOKENS = 64, 192
"""Expressions with more tokens than landmarks, and short enough to be learned in half a minute."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The command's options, checked when made."""

    out: Path
    steps: int
    examples: int
    lengths: str
    seed: int
    device: str
    dtype: str

    def __post_init__(self) -> None:
        for name in ("steps", "examples"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be at least 1.")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ValueError(f"--out {self.out}: must be a new or empty folder; give another one or remove it.")
        self.bench.cases()
        for attention in TRAINED:
            arguments_of(self.cell(attention), self.out, self.device)

    @cached_property
    def peers(self) -> list[str]:
        return [peer for peer, reason in available_peers().items() if not reason]

    @property
    def bench(self) -> BenchOptions:
        return BenchOptions(
            lengths=parse_lengths(self.lengths),
            attentions=[*MEASURED, *self.peers],
            budget=SECONDS_A_LENGTH,
            seed=self.seed,
            device=self.device,
            dtype=self.dtype,
        )

    @property
    def data(self) -> ListOpsOptions:
        return ListOpsOptions(
            min_tokens=MIN_TOKENS,
            max_tokens=MAX_TOKENS,
            train=self.examples,
            dev=-(-self.examples // 16),
            test=-(-self.examples // 8),
            seed=self.seed,
        )

    @property
    def recipe(self) -> Recipe:
        """That of `lra listops --preset mini` for shorter expressions and fewer steps."""
        return replace(
            RECIPES["mini"][TASK],
            steps=self.steps,
            batch_size=32,
            warmup=self.steps // 10,
            eval_every=-(-self.steps // 5),
            max_length=MAX_TOKENS,
            learning_rate=2e-3,
            dev_examples=None,
            data=self.data,
        )

    def cell(self, attention: str) -> Cell:
        return Cell(
            task=TASK,
            attention=attention,
            seed=self.seed,
            preset="demo",
            recipe=self.recipe,
            legacy=Legacy(),
            settings={},
            dtype=self.dtype,
        )


def run_demo(options: DemoOptions, say: Callable[[str], None]) -> None:
    """Data, training, efficiency, attention maps, report; the seconds of each are recorded."""
    out = options.out
    config = {**asdict(options), "out": str(out)}
    with user_input():
        write_config(out, config)
    recorder = Recorder(out, job="demo", config=config, seed=options.seed)
    with part("data", recorder, say, f"1 of 5: a small {TASKS[TASK].title} set"):
        generate(TASK, out / "data", options.data)
        splits = read_splits(TASK, out / "data", options.recipe, Legacy())
    for attention in TRAINED:
        with part(f"training, {attention}", recorder, say, f"2 of 5: train with {attention} attention"):
            train(options, attention, splits)
    with part("efficiency", recorder, say, "3 of 5: time and memory of one call"):
        for peer in available_peers().keys() - options.peers:
            say(f"   without {peer}, which is not installed")
        measure(options)
    with part("attention maps", recorder, say, "4 of 5: attention maps of the trained models"):
        for attention in TRAINED:
            write_maps(out / "attention-map" / attention, run_folder(out, attention), attention, splits, options.seed)
    with part("report", recorder, say, "5 of 5: the report"):
        write_report([out], out)
    records = list(read_records(out, out / "efficiency", *(run_folder(out, attention) for attention in TRAINED)))
    print_summary(records)
    say(f"Report: {out / PAGE}")


@contextmanager
def part(name: str, recorder: Recorder, say: Callable[[str], None], title: str) -> Iterator[None]:
    say(title)
    started = time.monotonic()
    yield
    recorder.record("seconds", time.monotonic() - started, part=name)


def run_folder(out: Path, attention: str) -> Path:
    return out / TASK / attention


def train(options: DemoOptions, attention: str, splits: Splits) -> None:
    cell, folder = options.cell(attention), run_folder(options.out, attention)
    arguments = arguments_of(cell, folder, options.device)
    run_cell(cell, splits, folder, arguments, prepare_cell(cell, splits, folder, arguments, resume=False))


def measure(options: DemoOptions) -> None:
    folder, bench = options.out / "efficiency", options.bench
    config = options_as_config(bench)
    write_config(folder, config)
    recorder = Recorder(folder, job="bench", config=config, seed=options.seed)
    with progress_bar(len(bench.lengths) * (len(bench.attentions) + 1)) as step:
        run_bench(bench, recorder, step)
