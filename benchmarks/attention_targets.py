"""How Nyström attention stands against its peers and its own limits, each figure a ratio from one run.

    python benchmarks/attention_targets.py --out results/bench/targets

Every figure: interleaved repeats of all sides in this process, by medians and by minima, and met only where both are;
memory in fresh processes. Batch 1, 12 heads of 64, 64 landmarks, convolution of 33, float32, as the efficiency table.
About six minutes on two quiet cores.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from lra_step import BATCH, LENGTH, build, stepper

from nystromformer.attention import build_attention
from nystromformer.attention.native import instructions, without_native
from nystromformer.bench.cases import Case, make_inputs, prepare
from nystromformer.bench.measure import Kernels, Times, interleaved_times, measure_memory
from nystromformer.bench.run import GEMM_SIZE
from nystromformer.files import write_text
from nystromformer.records import Recorder, command, new_job_folder
from nystromformer.report.efficiency import nystrom_flops
from nystromformer.report.table import Table

OURS, LOCAL, EXACT = "nystrom-64", "nystrom-local", "standard"
PEERS = ("transformers", "nystrom-attention")
MIXED_LENGTHS = range(512, 4096 + 1, 512)
"""Of eight examples in one padded batch."""
LIMITED = (512, 8192)
"""Where the time of the same arithmetic as one large matrix product stands beside."""
COUNTED_LENGTH = 512
"""Where kernels are counted: whatever the device, no loop over parts of the sequence is in them but the CPU's own."""


@dataclass(frozen=True)
class Speed:
    """How many times longer `other` takes than `ours`."""

    length: int
    backward: bool
    other: str
    ours: str
    target: float

    @property
    def name(self) -> str:
        what = "forward + backward" if self.backward else "forward"
        return f"{what}, {self.other} / {self.ours}, n = {self.length:,}"


def speeds(backward: bool, ours: str, targets: dict[int, float], *others: str) -> list[Speed]:
    return [Speed(length, backward, other, ours, target) for other in others for length, target in targets.items()]


SPEEDS = [
    *speeds(False, OURS, {512: 2, 4096: 3, 8192: 3}, *PEERS),
    *speeds(True, OURS, {512: 1.8, 4096: 2.5, 8192: 2.5}, *PEERS),
    *speeds(False, OURS, {512: 1.2, 1024: 3.5, 4096: 14, 8192: 30}, EXACT),
    *speeds(True, OURS, {512: 1.1, 2048: 6}, EXACT),
    *speeds(False, LOCAL, {1024: 2, 8192: 22}, EXACT),
]


@dataclass(frozen=True)
class Figure:
    name: str
    target: str
    value: float
    met: bool
    by_minimum: float | None = None


def at_least(name: str, target: float, value: float, by_minimum: float | None = None) -> Figure:
    met = min(value, value if by_minimum is None else by_minimum) >= target
    return Figure(name, f"≥ {target:g}", value, met, by_minimum)


def at_most(name: str, target: float, value: float, by_minimum: float | None = None) -> Figure:
    met = max(value, value if by_minimum is None else by_minimum) <= target
    return Figure(name, f"≤ {target:g}", value, met, by_minimum)


def ratios(slow: Times, fast: Times) -> tuple[float, float]:
    return slow.median / fast.median, slow.minimum / fast.minimum


def all_speeds(budget: float) -> Iterable[Figure]:
    """Whatever is compared at one length, in one direction, is timed together, with a large matrix product."""
    order = lambda speed: (speed.backward, speed.length)
    matrix = torch.randn(GEMM_SIZE, GEMM_SIZE)
    for (backward, length), group in groupby(sorted(SPEEDS, key=order), key=order):
        asked = list(group)
        cases = {
            name: Case(attention=name, length=length, backward=backward) for s in asked for name in (s.ours, s.other)
        }
        inputs = make_inputs(next(iter(cases.values())))
        runs = {name: prepare(case, inputs) for name, case in cases.items()} | {"gemm": lambda: matrix @ matrix}
        times = interleaved_times(runs, max_repeats=200, budget=budget)
        yield from (at_least(s.name, s.target, *ratios(times[s.other], times[s.ours])) for s in asked)
        if length in LIMITED and not backward:
            limit = nystrom_flops(cases[OURS].details) * times["gemm"].minimum / (2 * GEMM_SIZE**3)
            found = limit / times[OURS].median, limit / times[OURS].minimum
            yield at_least(f"GEMM-bound limit / {OURS}, n = {length:,}", 0.5, *found)


def masks(budget: float) -> Iterable[Figure]:
    plain = Case(attention=OURS, length=4096)
    inputs = make_inputs(replace(plain, masked=True))
    runs = {"masked": prepare(replace(plain, masked=True), inputs), "plain": prepare(plain, replace(inputs, mask=None))}
    times = interleaved_times(runs, max_repeats=100, budget=budget)
    yield at_most("masked / unmasked, n = 4,096", 1.1, *ratios(times["masked"], times["plain"]))

    case = Case(attention=OURS, length=max(MIXED_LENGTHS), batch=len(MIXED_LENGTHS))
    inputs = make_inputs(case)
    mask = torch.arange(case.length) < torch.tensor(MIXED_LENGTHS)[:, None]
    each = []
    for i, length in enumerate(MIXED_LENGTHS):
        tokens = {name: getattr(inputs, name)[i : i + 1, :length] for name in ("query", "key", "value")}
        each.append(prepare(Case(attention=OURS, length=length), replace(inputs, **tokens)))
    runs = {
        "batch": prepare(replace(case, masked=True), replace(inputs, mask=mask)),
        "alone": lambda: [run() for run in each],
    }
    times = interleaved_times(runs, budget=budget)
    name = (
        f"{len(MIXED_LENGTHS)} examples of {min(MIXED_LENGTHS)} to {max(MIXED_LENGTHS):,} tokens, a batch / each alone"
    )
    yield at_most(name, 1.3, *ratios(times["batch"], times["alone"]))


def short(budget: float) -> Iterable[Figure]:
    runs = {name: prepare(Case(attention=name, length=128)) for name in (OURS, EXACT)}
    times = interleaved_times(runs, max_repeats=300, budget=budget)
    yield at_most(f"forward, {OURS} / {EXACT}, n = 128", 1.5, *ratios(times[OURS], times[EXACT]))


def memory() -> Iterable[Figure]:
    for backward, target in ((False, 0.2), (True, 0.4)):
        ours, theirs = (
            measure_memory(Case(attention=name, length=8192, backward=backward)).bytes for name in (OURS, PEERS[0])
        )
        what = "forward + backward" if backward else "forward"
        yield at_most(f"peak memory, {what}, {OURS} / {PEERS[0]}, n = 8,192", target, ours / theirs)
    measured = measure_memory(Case(attention=OURS, length=2**20))
    inputs = 3 * 2**20 * 768 * 4
    total = (inputs + measured.bytes) / 2**30 if measured.bytes is not None else float("inf")
    yield at_most("forward of n = 1,048,576: GiB with its inputs", 24, total)


def kernels() -> Iterable[Figure]:
    for name, forward_target, backward_target in ((OURS, 50, 110), (LOCAL, 110, 200)):
        attention = build_attention(name, num_heads=12, head_dim=64)
        inputs = make_inputs(Case(attention=name, length=COUNTED_LENGTH, backward=True))
        leaves = [inputs.query, inputs.key, inputs.value]
        with without_native(), Kernels() as forward:  # what stands for a GPU's launches
            out = attention(*(x.unflatten(2, (12, 64)).transpose(1, 2) for x in leaves))
        with without_native(), Kernels() as backward:
            torch.autograd.grad(out, [*leaves, *attention.parameters()], out.detach())
        where = f"n = {COUNTED_LENGTH}"
        yield at_most(f"kernels dispatched, forward, {name}, {where}", forward_target, forward.count)
        yield at_most(f"kernels dispatched, backward, {name}, {where}", backward_target, backward.count)


def growth(budget: float) -> Iterable[Figure]:
    """A call at 262,144 against one at 32,768."""
    runs = {str(n): prepare(Case(attention=OURS, length=n)) for n in (32768, 262144)}
    times = interleaved_times(runs, warm_up=1, budget=budget)
    yield at_most("time(n = 262,144) / time(n = 32,768)", 10, *ratios(times["262144"], times["32768"]))


def training_step(budget: float) -> Iterable[Figure]:
    """ListOps at the paper's sizes, forward, backward and optimizer, as `lra_step.py` measures it."""
    batch = {"input_ids": torch.randint(1, 16, (BATCH, LENGTH)), "labels": torch.randint(0, 10, (BATCH,))}
    models = {"ours": build(OURS), "released": build(OURS, released=True)}
    runs = {name: stepper(model, iter(lambda: batch, None)) for name, model in models.items()}
    times = interleaved_times(runs, warm_up=1, budget=3 * budget)
    yield at_least("ListOps training step, the released way / ours", 2.8, *ratios(times["released"], times["ours"]))


def report(parts: Iterable[Callable[[], Iterable[Figure]]], recorder: Recorder) -> None:
    """Measure part by part; records, lines on the way, and a table."""
    figures: list[Figure] = []
    for part in parts:
        for figure in part():
            figures.append(figure)
            recorder.record("ratio", figure.value, figure=figure.name, target=figure.target, minimum=figure.by_minimum)
            print(f"{figure.name}: {figure.value:.2f} (target {figure.target}) {'met' if figure.met else 'missed'}")
    rows = [
        [
            f.name,
            f.target,
            f"{f.value:.2f}",
            f"{f.by_minimum:.2f}" if f.by_minimum else "–",
            "met" if f.met else "missed",
        ]
        for f in figures
    ]
    table = Table(["figure", "target", "by medians", "by minima", "met by both"], rows).markdown()
    ran = f"{torch.get_num_threads()} threads, native code: {instructions()}, torch {torch.__version__}"
    conditions = f"{ran}; `{command()}`"
    write_text(recorder.folder / "table.md", f"{table}\n\n{conditions}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/targets"))
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of timing for each group of figures")
    options = parser.parse_args()
    new_job_folder(options.out)
    parts = (
        lambda: all_speeds(options.budget),
        lambda: masks(options.budget),
        memory,
        kernels,
        lambda: training_step(options.budget),
        lambda: growth(options.budget),
        lambda: short(options.budget / 3),
    )
    report(parts, Recorder(options.out, job="attention_targets", config={"budget": options.budget}))


if __name__ == "__main__":
    main()
