"""How Nyström attention stands against its peers and its own limits, each figure a ratio from one run.

    python benchmarks/attention_targets.py --out results/bench/targets

Every figure: interleaved repeats of both sides in this process, medians and minima; memory in fresh processes.
Batch 1, 12 heads of 64, 64 landmarks, convolution of 33, float32, as the efficiency table.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nystromformer.bench.cases import Case, make_inputs, prepare
from nystromformer.bench.measure import Times, interleaved_times, measure_memory
from nystromformer.bench.run import time_cases
from nystromformer.files import write_text
from nystromformer.records import Recorder, command, new_job_folder
from nystromformer.report.table import Table
from nystromformer.report.tables import nystrom_flops

OURS = "nystrom-64"
PEERS = ("transformers", "nystrom-attention")


@dataclass(frozen=True)
class Figure:
    name: str
    target: str
    value: float
    met: bool
    by_minimum: float | None = None


def at_least(name: str, value: float, target: float, by_minimum: float | None = None) -> Figure:
    return Figure(name, f"≥ {target:g}", value, value >= target, by_minimum)


def at_most(name: str, value: float, target: float, by_minimum: float | None = None) -> Figure:
    return Figure(name, f"≤ {target:g}", value, value <= target, by_minimum)


def against_peers(backward: bool, target: float, budget: float) -> list[Figure]:
    figures = []
    for length in (4096, 8192):
        cases = [Case(attention=name, length=length, backward=backward) for name in (OURS, *PEERS)]
        times = time_cases(cases, budget)
        for peer in PEERS:
            what = "forward + backward" if backward else "forward"
            ratio, by_minimum = ratios(times[peer], times[OURS])
            figures.append(at_least(f"{what}, {peer} / ours, n = {length:,}", ratio, target, by_minimum))
    return figures


def against_exact_and_limit(budget: float) -> list[Figure]:
    case = Case(attention=OURS, length=8192)
    times = time_cases([case, replace(case, attention="standard")], budget)
    speed = 2 * 2048**3 / times["gemm"].minimum
    limit = nystrom_flops(case.details) / speed
    ratio, by_minimum = ratios(times["standard"], times[OURS])
    return [
        at_least("forward, exact SDPA / ours, n = 8,192", ratio, 30, by_minimum),
        at_least("GEMM-bound limit / ours, n = 8,192", limit / times[OURS].median, 0.5, limit / times[OURS].minimum),
    ]


def memory() -> list[Figure]:
    figures = []
    for backward, target in ((False, 1 / 3), (True, 1 / 2)):
        ours, theirs = (
            measure_memory(Case(attention=name, length=8192, backward=backward)).bytes for name in (OURS, PEERS[0])
        )
        what = "forward + backward" if backward else "forward"
        figures.append(at_most(f"peak memory, {what}, ours / {PEERS[0]}, n = 8,192", ours / theirs, round(target, 2)))
    return figures


def growth(budget: float) -> list[Figure]:
    """A call at 262,144 against one at 32,768."""
    runs = {str(n): prepare(Case(attention=OURS, length=n)) for n in (32768, 262144)}
    times = interleaved_times(runs, warm_up=1, budget=budget)
    ratio, by_minimum = ratios(times["262144"], times["32768"])
    return [at_most("time(n = 262,144) / time(n = 32,768)", ratio, 10, by_minimum)]


def masked_and_short(budget: float) -> list[Figure]:
    plain = Case(attention=OURS, length=4096)
    inputs = make_inputs(replace(plain, masked=True))
    runs = {"masked": prepare(replace(plain, masked=True), inputs), "plain": prepare(plain, replace(inputs, mask=None))}
    times = interleaved_times(runs, budget=budget)
    short = Case(attention=OURS, length=128)
    brief = interleaved_times(
        {name: prepare(replace(short, attention=name)) for name in (OURS, "standard")}, max_repeats=300, budget=budget
    )
    return [
        at_most("masked / unmasked, n = 4,096", *_swap(ratios(times["masked"], times["plain"]), 1.3)),
        at_most("ours / exact, n = 128", *_swap(ratios(brief[OURS], brief["standard"]), 1.5)),
    ]


def million() -> list[Figure]:
    measured = measure_memory(Case(attention=OURS, length=2**20))
    inputs = 3 * 2**20 * 768 * 4
    total = (inputs + measured.bytes) / 2**30 if measured.bytes is not None else float("inf")
    return [at_most("forward of n = 1,048,576: GiB with its inputs", total, 24)]


def ratios(slow: Times, fast: Times) -> tuple[float, float]:
    return slow.median / fast.median, slow.minimum / fast.minimum


def _swap(both: tuple[float, float], target: float) -> tuple[float, float, float]:
    return both[0], target, both[1]


def report(parts: Iterable[Callable[[], list[Figure]]], recorder: Recorder) -> None:
    """Measure part by part; records, lines on the way, and a table."""
    figures: list[Figure] = []
    for part in parts:
        for figure in part():
            figures.append(figure)
            recorder.record("ratio", figure.value, figure=figure.name, target=figure.target, minimum=figure.by_minimum)
            print(f"{figure.name}: {figure.value:.2f} (target {figure.target}) {'met' if figure.met else 'missed'}")
    rows = [
        [f.name, f.target, f"{f.value:.2f}", f"{f.by_minimum:.2f}" if f.by_minimum else "–", "yes" if f.met else "no"]
        for f in figures
    ]
    table = Table(["figure", "target", "by medians", "by minima", "met"], rows).markdown()
    conditions = f"{torch.get_num_threads()} threads, torch {torch.__version__}; `{command()}`"
    write_text(recorder.folder / "table.md", f"{table}\n\n{conditions}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/targets"))
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of timing for each figure")
    options = parser.parse_args()
    new_job_folder(options.out)
    parts = (
        lambda: against_peers(False, 2.0, options.budget),
        lambda: against_peers(True, 1.7, options.budget),
        lambda: against_exact_and_limit(options.budget),
        memory,
        lambda: growth(options.budget),
        lambda: masked_and_short(options.budget),
        million,
    )
    report(parts, Recorder(options.out, job="attention_targets", config={"budget": options.budget}))


if __name__ == "__main__":
    main()
