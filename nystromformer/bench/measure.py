"""Time by interleaved repeats, peak memory in a fresh process."""

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

from nystromformer.bench.cases import Case, prepare

MEASURED = {
    "cpu": "rise of the process's peak resident memory during one call, in a fresh process",
    "cuda": "rise of the allocator's peak during one call",
}
"""What peak memory is, by the kind of device."""
WARM_UP_LENGTH = 256
OUT_OF_MEMORY_EXIT = 86
"""How a process that measures says that it ran out of memory."""


@dataclass(frozen=True)
class Times:
    """Seconds of each repeat."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)


def interleaved_times(
    runs: Mapping[str, Callable[[], None]],
    *,
    warm_up: int = 2,
    min_repeats: int = 3,
    max_repeats: int = 30,
    budget: float = 10.0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Time each of `runs` in turn, round after round, until each had `max_repeats` or the `budget` in seconds is used.

    The order rotates from round to round, so that nobody always runs after the same neighbor. `tick` is called
    after each round.

    >>> sorted(interleaved_times({"a": lambda: None, "b": lambda: None}, max_repeats=3))
    ['a', 'b']
    """
    names = list(runs)
    for name in names:
        for _ in range(warm_up):
            runs[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    for repeat in range(max_repeats):
        if repeat >= min_repeats and time.perf_counter() - started > budget:
            break
        for offset in range(len(names)):
            name = names[(offset + repeat) % len(names)]
            before = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - before)
        tick()
    return {name: Times(tuple(values)) for name, values in seconds.items()}


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak and seconds of the one call; `failure` says why there are none."""

    bytes: int | None
    seconds: float | None
    failure: str = ""


def measure_memory(case: Case, timeout: float | None = None) -> Memory:
    """Peak memory of one call of `case`. Running out of memory is a result, not a crash."""
    if case.device.startswith("cuda"):
        return _measure_cuda(case)
    command = [sys.executable, "-m", "nystromformer.bench.measure", json.dumps(asdict(case))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Memory(None, None, f"took longer than {timeout:.0f} s")
    if done.returncode in (OUT_OF_MEMORY_EXIT, -9):  # ours, or the system's killer
        return Memory(None, None, "out of memory")
    if done.returncode != 0:
        raise RuntimeError(f"measuring {case} failed:\n{done.stderr}")
    return Memory(**json.loads(done.stdout.splitlines()[-1]))


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _measure_cuda(case: Case) -> Memory:
    try:
        run = prepare(case)
        run()
        torch.cuda.reset_peak_memory_stats(case.device)
        held = torch.cuda.memory_allocated(case.device)
        started = time.perf_counter()
        run()
        return Memory(torch.cuda.max_memory_allocated(case.device) - held, time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return Memory(None, None, "out of memory")
    finally:
        torch.cuda.empty_cache()


def _measure_here(case: Case) -> Memory:
    short = min(case.length, WARM_UP_LENGTH)
    prepare(replace(case, length=short))()
    return peak_of(prepare(case))


def peak_of(run: Callable[[], None]) -> Memory:
    """Peak memory of one call in this process, which should be a fresh one that has run something small before."""
    _give_back_freed_memory()
    _reset_peak()
    held = _resident("VmRSS")
    started = time.perf_counter()
    run()
    return Memory(max(_resident("VmHWM") - held, 0), time.perf_counter() - started)


def _give_back_freed_memory() -> None:
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _resident(field: str) -> int:
    """Bytes of a field of the process's status: VmRSS now, VmHWM at its peak."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource  # elsewhere than on Linux only the peak since the start is known

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(_measure_here(Case(**json.loads(sys.argv[1]))))))
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            sys.exit(OUT_OF_MEMORY_EXIT)
        raise
