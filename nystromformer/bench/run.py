"""The whole benchmark: memory of each cell in a process of its own, then the times of each length interleaved."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from nystromformer.attention.registry import parse_attention_name
from nystromformer.bench.cases import DTYPES, Case, Setting, make_inputs, prepare
from nystromformer.bench.measure import (
    MEASURED,
    Memory,
    Times,
    interleaved_times,
    is_out_of_memory,
    measure_memory,
    warm,
)
from nystromformer.checks import check_number
from nystromformer.errors import UserError
from nystromformer.paper import DENSE, PEERS
from nystromformer.records import Recorder

PROBE_LENGTH = 1024
"""Cells longer than four times this are first predicted from a run at this length."""
WARM_UP = 3
GEMM_SIZE = 2048
"""Of the square matrices whose product shows how fast the machine computes."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Setting):
    """What to measure; every attention at every length."""

    lengths: list[int]
    attentions: list[str]
    budget: float = 15.0
    """Seconds of timing for each length, all attentions together; each gets at least three repeats."""
    steady: float | None = None
    """Timing of a length ends early once the three fastest repeats of each attention lie within this share."""
    machine_limit: bool = True
    """Also time a large matrix product, which shows how fast the machine computes."""
    cell_limit: float = 60.0
    """A cell whose one call would take longer than this many seconds is skipped."""

    def __post_init__(self) -> None:
        check_number("budget", self.budget, 0)
        check_number("cell_limit", self.cell_limit, 0)
        if not self.lengths or not self.attentions:
            raise ValueError("lengths and attentions: must name at least one each.")
        least, available = min(case.input_bytes for case in self.cases()), available_bytes(self.device)
        if least > available:
            raise ValueError(
                f"the smallest input alone would need {gibibytes(least)} of {gibibytes(available)}: give a smaller "
                f"length, batch, number of heads or width."
            )

    def case(self, attention: str, length: int) -> Case:
        shared = {field.name: getattr(self, field.name) for field in fields(Setting)}
        return Case(attention=attention, length=length, **shared)

    def cases(self) -> list[Case]:
        """All cells, length by length; ValueError for what can't be measured at all."""
        return [self.case(attention, length) for length in self.lengths for attention in self.attentions]


def run_bench(options: BenchOptions, recorder: Recorder, step: Callable[[str], None] = lambda label: None) -> None:
    """Measure and record all cells. `step` is called before each of them, with what comes next.

    `UserError` where each of them had to be left out or ran out of memory: there would be an empty table.
    """
    seen: dict[str, tuple[int, Memory]] = {}  # by attention: the longest measured so far
    left_out: dict[str, str] = {}
    for length in options.lengths:
        alive = []
        for attention in options.attentions:
            case = options.case(attention, length)
            step(f"{attention}, n = {length:,}: memory")
            reason = reason_to_skip(case, seen, options)
            measured = Memory(None, None, reason) if reason else measure_memory(case, timeout=5 * options.cell_limit)
            recorder.record(
                "peak_memory",
                measured.bytes,
                unit="bytes",
                skipped=reason,
                failure=measured.failure,
                measured=MEASURED[case.device.split(":")[0]],
                **case.details,
            )
            if not measured.failure:
                seen[attention] = (length, measured)
                alive.append(case)
            else:
                left_out[f"{attention}, n = {length:,}"] = measured.failure
        step(f"n = {length:,}: times")
        for name, times in time_cases(alive, options.budget, options.steady, options.machine_limit).items():
            recorder.record(
                "time",
                times.median,
                **times.spread,
                **(options.case(name, length).details if name != "gemm" else {"attention": "gemm", "length": length}),
                **({"flops": 2 * GEMM_SIZE**3} if name == "gemm" else {}),
            )
    if len(left_out) == len(options.cases()):
        (cell, reason), *_ = left_out.items()
        raise UserError(f"nothing could be measured ({cell}: {reason}); give smaller sizes or a larger --cell-limit.")


def time_cases(
    cases: list[Case], budget: float, steady: float | None = None, machine_limit: bool = True
) -> dict[str, Times]:
    """Interleaved times of cases of one length and, unless not wanted, of a large matrix product."""
    if not cases:
        return {}
    inputs = make_inputs(cases[0])
    runs = {}
    for case in cases:
        try:
            run = prepare(case, inputs)
            warm(run, WARM_UP)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            continue  # its record of memory tells
        runs[case.attention] = run
    if not machine_limit:
        return interleaved_times(runs, warm_up=0, budget=budget, steady=steady)
    matrix = torch.randn(GEMM_SIZE, GEMM_SIZE, device=cases[0].device, dtype=DTYPES[cases[0].dtype])

    def gemm() -> None:
        matrix @ matrix
        if matrix.is_cuda:
            torch.cuda.synchronize(matrix.device)

    warm(gemm, WARM_UP)
    return interleaved_times({**runs, "gemm": gemm}, warm_up=0, budget=budget, steady=steady)


def reason_to_skip(case: Case, seen: dict[str, tuple[int, Memory]], options: BenchOptions) -> str:
    """Why a cell would take too long or too much memory, as far as can be told beforehand; otherwise nothing."""
    if case.attention in PEERS and case.length % 64:
        return "needs a length divisible by its 64 landmarks"
    available = available_bytes(case.device)
    if case.input_bytes > available:
        return f"inputs would need {gibibytes(case.input_bytes)} of {gibibytes(available)}"
    if case.attention not in seen and case.length > 4 * PROBE_LENGTH:
        probe = measure_memory(replace(case, length=PROBE_LENGTH), timeout=5 * options.cell_limit)
        if probe.failure:
            return f"{probe.failure} at n = {PROBE_LENGTH:,}"
        seen[case.attention] = (PROBE_LENGTH, probe)
    length, before = seen.get(case.attention, (case.length, Memory(0, 0.0)))
    before_seconds, before_bytes = before.seconds or 0.0, before.bytes or 0
    growth = case.length / length
    quadratic = case.attention == DENSE or (case.attention not in PEERS and not is_linear(case.attention))
    seconds = before_seconds * growth ** (2 if quadratic else 1)
    needed = case.input_bytes + before_bytes * growth ** (2 if case.attention == DENSE else 1)
    if needed > available:
        return f"would need about {gibibytes(needed)} of {gibibytes(available)}"
    if seconds > options.cell_limit:
        return f"would take about {seconds:.0f} s per call"
    return ""


def gibibytes(number: float) -> str:
    """
    >>> gibibytes(3 * 2**28)
    '0.8 GiB'
    """
    return f"{number / 2**30:,.1f} GiB"


def is_linear(attention: str) -> bool:
    return parse_attention_name(attention)[0].linear


def available_bytes(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") + _reclaimable()
    except (ValueError, OSError):
        return 2**62  # unknown: then running out is found out by running


def _reclaimable() -> int:
    """Bytes of file cache, which the system gives up on demand."""
    try:
        with open("/proc/meminfo") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith("Cached:")), 0)
    except OSError:
        return 0
