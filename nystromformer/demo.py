"""What `nystromformer demo` runs: train, measure, draw, and sum up in a table."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from nystromformer.bench.attention_study import AttentionStudy
from nystromformer.bench.cases import available_peers, parse_lengths
from nystromformer.bench.run import BenchOptions, run_bench
from nystromformer.data.lra import TASKS, Splits
from nystromformer.data.lra.examples import FIRST_TOKEN, PADDING
from nystromformer.data.lra.listops import TOKENS, ListOpsOptions
from nystromformer.errors import user_input
from nystromformer.integrations.probe import own_calls
from nystromformer.models.lra import NystromformerForLongRangeArena
from nystromformer.progress import steps_bar
from nystromformer.records import Recorder, read_records, results, write_config
from nystromformer.report.page import PAGE, write_report
from nystromformer.report.tables import Entry, measured, measured_lengths
from nystromformer.training.lra import Legacy, LraCell, generate, read_splits
from nystromformer.training.recipes import LRA_RECIPES, LraRecipe
from nystromformer.training.run import MODEL
from nystromformer.training.sweep import run_cell

Record = dict[str, Any]

NAMES = {"standard": "exact", "dense": "exact, n×n matrix", "nystrom-64": "nystrom-64 (ours)"}

NOTE = (
    "exact: PyTorch's fused kernel; with the n×n matrix in memory it is what the paper compares with. Memory: peak of "
    "one call above its inputs. The models saw {examples:,} examples each, with one seed: too few to tell small "
    "differences between them, or how far they would get. All of it took {minutes:.1f} minutes."
)


def print_summary(records: list[Record]) -> None:
    console = Console()
    console.print(training_table(records))
    console.print(efficiency_table(records))
    trained = results(records, "lra")[0]
    minutes = sum(seconds_of_parts(records).values()) / 60
    note = NOTE.format(examples=trained["examples_seen"], minutes=minutes)
    console.print(note, style="dim", highlight=False)


def training_table(records: list[Record]) -> Table:
    seconds, trained = seconds_of_parts(records), results(records, "lra")
    title = f"ListOps of up to {trained[0]['config']['max_length']} tokens"
    table = Table("attention", title=title, title_justify="left")
    for name in ("test accuracy", "most frequent class", "time"):
        table.add_column(name, justify="right")
    for record in trained:
        attention = record["config"]["attention"]
        took = seconds[f"training, {attention}"]
        table.add_row(attention, f"{record['value']:.1%}", f"{record['majority']:.1%}", f"{took:,.0f} s")
    return table


def efficiency_table(records: list[Record]) -> Table:
    entries = measured(record for record in records if record["job"] == "bench" and record.get("attention") != "gemm")
    table = Table("attention", title="Time and memory of one call, 12 heads × 64", title_justify="left")
    for length in measured_lengths(entries):
        table.add_column(f"n = {length:,}", justify="right")
    for name, by_length in entries.items():
        row = [cell_text(by_length.get(length, Entry())) for length in measured_lengths(entries)]
        table.add_row(NAMES.get(name, name), *row, style="bold" if name.startswith("nystrom-6") else None)
    return table


def cell_text(cell: Entry) -> str:
    """
    >>> cell_text(Entry(seconds=0.0123, bytes=3_000_000)), cell_text(Entry(seconds=1.2345, bytes=1_612_000_000))
    ('12.3 ms, 3 MB', '1,234 ms, 1.6 GB')
    """
    if cell.seconds is None or cell.bytes is None:
        return cell.reason or "–"
    time = f"{cell.seconds * 1e3:,.{1 if cell.seconds < 0.1 else 0}f} ms"
    return f"{time}, {cell.bytes / 1e9:,.1f} GB" if cell.bytes >= 1e9 else f"{time}, {cell.bytes / 1e6:,.0f} MB"


def seconds_of_parts(records: list[Record]) -> dict[str, float]:
    return {record["part"]: record["value"] for record in records if record["job"] == "demo"}


LANDMARKS = [16, 32, 64]

EXAMPLES = 8
"""Test examples of middle length, over which errors are averaged; the first is drawn."""


def write_maps(out: Path, run: Path, attention: str, splits: Splits, seed: int) -> None:
    """Exact and Nyström attention of the queries and keys in the model of a finished run."""
    model = NystromformerForLongRangeArena.from_pretrained(run / MODEL).eval()
    by_length = np.argsort(splits.test.lengths, kind="stable")
    middle = max(0, (len(by_length) - EXAMPLES) // 2)
    chosen = by_length[middle : middle + EXAMPLES]
    inputs = {name: value for name, value in splits.test.batch(chosen.tolist()).items() if name != "labels"}
    words = [TOKENS[token - FIRST_TOKEN] for token in inputs["input_ids"][0].tolist() if token != PADDING]
    study = AttentionStudy("nystrom", LANDMARKS)
    study.take([own_calls(model, **inputs)], words, f"ListOps model trained with {attention}")
    config = {
        "model": f"ListOps, trained with {attention}",
        "landmarks": LANDMARKS,
        "attention": "nystrom",
        "examples": len(chosen),
    }
    study.write(out, config, seed, layers=range(study.layers))


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
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ValueError(f"--out {self.out}: must be a new or empty folder; give another one or remove it.")
        _ = self.bench  # checked when made
        for attention in TRAINED:
            self.cell(attention).arguments(self.out, self.device)

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
    def recipe(self) -> LraRecipe:
        """That of `lra listops --preset mini` for shorter expressions and fewer steps."""
        return replace(
            LRA_RECIPES["mini"][TASK],
            steps=self.steps,
            batch_size=32,
            warmup=self.steps // 10,
            eval_every=-(-self.steps // 5),
            max_length=MAX_TOKENS,
            learning_rate=2e-3,
            dev_examples=None,
            data=self.data,
        )

    def cell(self, attention: str) -> LraCell:
        return LraCell(
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
    run_cell(options.cell(attention), splits, run_folder(options.out, attention), options.device, resume=False)


def measure(options: DemoOptions) -> None:
    folder, bench = options.out / "efficiency", options.bench
    config = asdict(bench)
    write_config(folder, config)
    recorder = Recorder(folder, job="bench", config=config, seed=options.seed)
    with steps_bar(len(bench.lengths) * (len(bench.attentions) + 1)) as step:
        run_bench(bench, recorder, step)
