"""How `nystrom-local` stands against exact attention and against `nystrom`, each figure a ratio from one run.

    python benchmarks/nystrom_local_targets.py --out results/nystrom-local/targets

Measured as in `attention_targets.py`: batch 1, 12 heads of 64, 64 landmarks, float32; the paper's attention with its
convolution of 33, ours without one, as both are by default. Use all cores and a quiet machine.
"""

import argparse
from pathlib import Path

from attention_targets import Figure, at_least, at_most, ratios, report

from nystromformer.bench.cases import Case, prepare
from nystromformer.bench.measure import interleaved_times, measure_memory
from nystromformer.bench.run import time_cases
from nystromformer.records import Recorder, new_job_folder

OURS, PAPERS, EXACT = "nystrom-local-64", "nystrom-64", "standard"


def against_exact(length: int, target: float, backward: bool, budget: float) -> list[Figure]:
    times = time_cases([Case(attention=name, length=length, backward=backward) for name in (OURS, EXACT)], budget)
    what = "forward + backward" if backward else "forward"
    ratio, by_minimum = ratios(times[EXACT], times[OURS])
    return [at_least(f"{what}, exact SDPA / ours, n = {length:,}", target, ratio, by_minimum)]


def against_papers(length: int, target: float, backward: bool, budget: float) -> list[Figure]:
    times = time_cases([Case(attention=name, length=length, backward=backward) for name in (OURS, PAPERS)], budget)
    what = "forward + backward" if backward else "forward"
    ratio, by_minimum = ratios(times[OURS], times[PAPERS])
    return [at_most(f"{what}, ours / nystrom, n = {length:,}", target, ratio, by_minimum)]


def growth(short: int, long: int, budget: float) -> list[Figure]:
    """Linear would be the ratio of the lengths; a tenth more is allowed for memory, a quarter for time."""
    linear = long / short
    times = interleaved_times(
        {str(n): prepare(Case(attention=OURS, length=n)) for n in (short, long)}, warm_up=1, budget=budget
    )
    ratio, by_minimum = ratios(times[str(long)], times[str(short)])
    figures = [at_most(f"time(n = {long:,}) / time(n = {short:,})", 1.25 * linear, ratio, by_minimum)]
    for backward in (False, True):
        peaks = [measure_memory(Case(attention=OURS, length=n, backward=backward)).bytes for n in (long, short)]
        what = "forward + backward" if backward else "forward"
        name = f"peak memory, {what}, n = {long:,} / n = {short:,}"
        figures.append(at_most(name, 1.1 * linear, peaks[0] / peaks[1]))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/nystrom-local-targets"))
    parser.add_argument("--budget", type=float, default=15.0, help="seconds of timing for each figure")
    options = parser.parse_args()
    try:
        new_job_folder(options.out)
    except ValueError as error:
        parser.error(str(error))
    parts = (
        lambda: against_exact(1024, 1, False, options.budget),
        lambda: against_exact(2048, 1, False, options.budget),
        lambda: against_exact(8192, 12, False, options.budget),
        lambda: against_papers(8192, 3, False, options.budget),
        lambda: against_exact(1024, 1, True, options.budget),
        lambda: against_papers(8192, 3, True, options.budget),
        lambda: growth(8192, 65536, options.budget),
    )
    report(parts, Recorder(options.out, job="nystrom_local_targets", config={"budget": options.budget}))


if __name__ == "__main__":
    main()
