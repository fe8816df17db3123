"""What `bench` measured, from records alone: times and memory of attentions, ratios to baselines, to the paper's and to
other packages'."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from nystromformer.paper import DENSE, EFFICIENCY, PEERS
from nystromformer.report.table import MISSING, Code, Table, is_ours

MAIN = "nystrom-64"
"""The attention that is compared with other packages', and whose limit is shown."""
TIME_BASELINE = "standard"
"""Exact attention by PyTorch's fused kernel: the fastest that people would use instead."""
LIMIT = "GEMM-bound limit"
SETUP = ("backward", "masked", "batch", "heads", "head_dim", "dtype", "device")
"""What must agree for measurements to stand in one table."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """What was measured of one attention at one length; None where it was not, with the reason."""

    seconds: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    bytes: int | None = None
    reason: str = "not run"


Entries = dict[str, dict[int, Entry]]
"""By attention, then length."""


def measured(records: Iterable[Record]) -> Entries:
    """The newest measurement of each attention and length, in the order of the records, and the limit of `MAIN`."""
    found: Entries = defaultdict(lambda: defaultdict(Entry))
    work: dict[int, int] = {}
    speed: dict[int, float] = {}  # seconds per operation of a large matrix product
    for record in records:
        attention, length = record["attention"], record["length"]
        if attention == "gemm":
            speed[length] = record["minimum"] / record["flops"]
        elif record["metric"] == "time":
            times = {"seconds": record["value"], "minimum": record["minimum"], "maximum": record.get("maximum")}
            found[attention][length] = replace(found[attention][length], **times)
            if attention == MAIN and not record["backward"]:
                work[length] = nystrom_flops(record)
        else:
            memory = {"bytes": record["value"], "reason": record["skipped"] or record["failure"]}
            found[attention][length] = replace(found[attention][length], **memory)
    limits = {n: Entry(speed[n] * work[n], reason=MISSING) for n in work if n in speed}
    entries = {name: dict(by_length) for name, by_length in found.items()}
    return entries | ({LIMIT: limits} if limits else {})


def setup_text(setup: dict[str, Any]) -> str:
    """
    >>> setup_text({"backward": True, "masked": False, "batch": 1, "heads": 12, "head_dim": 64, "dtype": "float32"})
    'One call, forward and backward, batch 1, 12 heads × 64, float32'
    """
    parts = ["One call", "forward and backward" if setup["backward"] else "forward"]
    parts += [f"batch {setup['batch']}", f"{setup['heads']} heads × {setup['head_dim']}"]
    parts += [str(setup[name]) for name in ("dtype", "device") if setup.get(name)]
    return ", ".join([*parts, "an eighth of it padding"] if setup.get("masked") else parts)


def nystrom_flops(details: Record, landmarks: int = 64, kernel: int = 33, iterations: int = 6) -> int:
    """Multiply-adds of Nyström attention, forward, times two: four products with n and m, the pseudoinverse, the
    convolution.

    >>> nystrom_flops({"batch": 1, "heads": 12, "head_dim": 64, "length": 8192}) / 1e9
    3.800039424
    """
    b, h, d, n, m = details["batch"], details["heads"], details["head_dim"], details["length"], landmarks
    products, inverse, convolution = 4 * n * m * d, (4 * iterations + 1) * m**3 + m * m * d, n * kernel * d
    return 2 * b * h * (products + inverse + convolution)


def measured_lengths(entries: Entries) -> list[int]:
    return sorted({length for by_length in entries.values() for length in by_length})


def ratio(baseline: float | None, value: float | None) -> float | None:
    """How many times less `value` is than `baseline`; None where one is missing."""
    return baseline / value if baseline and value else None


def crossing(entries: Entries, ours: str = MAIN, theirs: str = TIME_BASELINE) -> float | None:
    """The length from which on `ours` is faster than `theirs`, where that lies between two measured ones.

    Between them times are taken to be powers of the length; the fastest repeats are compared.

    >>> exact, ours = ({n: Entry(minimum=t) for n, t in times} for times in (((64, 1), (256, 16)), ((64, 2), (256, 8))))
    >>> crossing({"standard": exact, "nystrom-64": ours})
    128.0
    """
    own, other = entries.get(ours, {}), entries.get(theirs, {})
    both = [(n, ratio(other[n].minimum, own[n].minimum)) for n in sorted(own.keys() & other.keys())]
    known = [(n, times) for n, times in both if times]
    for (short, before), (long, after) in reversed(list(pairwise(known))):
        if before < 1 <= after:
            return short * (long / short) ** (-math.log(before) / math.log(after / before))
    return None


def rounded(length: float) -> int:
    """To two digits.

    >>> rounded(1234.5), rounded(98.6)
    (1200, 99)
    """
    digits = 1 - math.floor(math.log10(length))
    return int(round(length, digits))


def paper_ratio(attention: str, length: int, column: int) -> float | None:
    """The paper's own ratio to standard attention; column 0 is memory, 1 is time."""
    if attention not in EFFICIENCY or length not in EFFICIENCY[attention]:
        return None
    return EFFICIENCY["standard"][length][column] / EFFICIENCY[attention][length][column]


def time_text(entries: Entries, attention: str, length: int) -> str:
    entry = entries[attention].get(length, Entry())
    if entry.seconds is None:
        return entry.reason or "not run"
    base = entries.get(TIME_BASELINE, {}).get(length, Entry()).seconds
    return f"{entry.seconds * 1e3:,.1f} ms" + _ratios(ratio(base, entry.seconds), paper_ratio(attention, length, 1))


def spread_text(entry: Entry) -> str:
    """
    >>> spread_text(Entry(seconds=0.011, minimum=0.010, maximum=0.015))
    '10.0 ms, +10 %, +50 %'
    """
    if not entry.minimum or entry.seconds is None or entry.maximum is None:
        return MISSING
    above = [f"+{100 * (value / entry.minimum - 1):.0f} %" for value in (entry.seconds, entry.maximum)]
    return f"{entry.minimum * 1e3:,.1f} ms, {', '.join(above)}"


def memory_text(entries: Entries, attention: str, length: int) -> str:
    entry = entries[attention].get(length, Entry())
    if entry.bytes is None:
        return entry.reason or "not run"
    base = entries.get(memory_baseline(entries), {}).get(length, Entry()).bytes
    return f"{entry.bytes / 1e6:,.0f} MB" + _ratios(ratio(base, entry.bytes), paper_ratio(attention, length, 0))


def memory_baseline(entries: Entries) -> str:
    """Exact attention with its matrix in memory, as the paper measured it; the fused kernel where that was not run."""
    return DENSE if DENSE in entries else "standard"


def _ratios(ours: float | None, papers: float | None) -> str:
    return (f" ({ours:.1f}×)" if ours else "") + (f" [{papers:.1f}×]" if papers else "")


def peer_rows(entries: Entries) -> list[list[str]]:
    """How many times faster, and with how many times less memory, `MAIN` does the same work as each peer."""
    rows = []
    for peer in (name for name in PEERS if name in entries):
        row = [peer]
        for n in measured_lengths(entries):
            ours, theirs = entries.get(MAIN, {}).get(n, Entry()), entries[peer].get(n, Entry())
            time, memory = ratio(theirs.seconds, ours.seconds), ratio(theirs.bytes, ours.bytes)
            row.append(f"{time:.1f}× time, {memory:.1f}× memory" if time and memory else MISSING)
        rows.append(row)
    return rows


def efficiency_tables(records: Iterable[Record]) -> list[Table]:
    """Time, memory, and how we compare with other packages: attentions × lengths."""
    entries = measured(records)
    lengths, paper = measured_lengths(entries), ", [×] the paper's own ratio."
    header = ["attention", *(f"n = {n:,}" for n in lengths)]
    times: tuple[str, ...] = ("Median of interleaved repeats; (×) faster than ", Code(TIME_BASELINE), paper)
    if LIMIT in entries:
        times += (f" {LIMIT}: the operation's arithmetic at the speed of a large matrix product in the same run.",)
    peaks = ("Peak of one call above its inputs; (×) less than ", Code(memory_baseline(entries)), paper)
    tables = []
    for title, text, note in (("Time", time_text, times), ("Peak memory", memory_text, peaks)):
        names = [name for name in entries if name != LIMIT or text is time_text]
        rows = [[name, *(text(entries, name, n) for n in lengths)] for name in names]
        highlight = {place for place, name in enumerate(names) if is_ours(name)}
        tables.append(Table(header, rows, highlight, title=title, note=note))
    if any(entry.maximum for by_length in entries.values() for entry in by_length.values()):
        names = [name for name in entries if name != LIMIT]
        rows = [[name, *(spread_text(entries[name].get(n, Entry())) for n in lengths)] for name in names]
        highlight = {place for place, name in enumerate(names) if is_ours(name)}
        spread = (
            "The fastest repeat, and how far above it the median and the slowest lie: how disturbed the machine was."
        )
        tables.append(Table(header, rows, highlight, title="Spread of the times", note=spread))
    if peers := peer_rows(entries):
        tables.append(Table(header, peers, title=(Code(MAIN), " against the same work elsewhere")))
    return tables
