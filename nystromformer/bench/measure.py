"""Time by interleaved repeats, peak memory of one call in a fresh process of its own, and the kernels it dispatches.

On a CPU such processes are forked from a server that has imported what they need and computed nothing, so that each
starts from the same state within milliseconds. Run as a program, this file is that server: it reads one request per
line and writes one answer per line.
"""

import atexit
import ctypes
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nystromformer.bench.cases import Case, prepare
from nystromformer.paper import PEERS

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.unique_dim.default,
}
"""Operations whose result a host must wait for: numbers in Python, and shapes that depend on data."""

NOTHING_LAUNCHED = {
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.lift_fresh.default,
    aten.new_empty.default,
}
"""Views by another name, and memory without content."""
SLOW = 0.5
"""A call that takes longer than these seconds is warm after one."""

MEASURED = {
    "cpu": "rise of the process's peak resident memory during one call, in a fresh process",
    "cuda": "rise of the allocator's peak during one call",
}
"""What peak memory is, by the kind of device."""
WARM_UP_LENGTH = 256
OUT_OF_MEMORY_EXIT = 86
"""How a process that measures says that it ran out of memory."""
PRELOADED = {"transformers": "transformers.models.nystromformer.modeling_nystromformer"}
"""What takes seconds to import, by attention; of others their package."""


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

    @property
    def spread(self) -> dict[str, float | str]:
        """What a record says beside the median.

        >>> Times((1.0, 1.5)).spread
        {'unit': 's', 'minimum': 1.0, 'maximum': 1.5, 'repeats': 2}
        """
        repeats = len(self.seconds)
        return {"unit": "s", "minimum": self.minimum, "maximum": max(self.seconds), "repeats": repeats}

    def is_steady(self, within: float, count: int = 3) -> bool:
        """Whether the `count` fastest lie within this share of the fastest: then no disturbance made it.

        >>> Times((1.0, 1.5, 1.02, 1.01)).is_steady(0.05), Times((1.0, 1.5, 1.02)).is_steady(0.05)
        (True, False)
        """
        fastest = sorted(self.seconds)[:count]
        return len(fastest) == count and fastest[-1] <= (1 + within) * fastest[0]


def interleaved_times(
    runs: Mapping[str, Callable[[], None]],
    *,
    warm_up: int = 2,
    min_repeats: int = 3,
    max_repeats: int = 30,
    budget: float = 10.0,
    steady: float | None = None,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Time each of `runs` in turn, round after round, until each had `max_repeats` or the `budget` in seconds is used.

    The order rotates from round to round, so that nobody always runs after the same neighbor. `tick` is called
    after each round. With `steady` the rounds end as soon as the three fastest times of each lie within this share:
    a quiet machine is measured soon, and a disturbed one for as long as the budget allows.

    >>> sorted(interleaved_times({"a": lambda: None, "b": lambda: None}, max_repeats=3))
    ['a', 'b']
    """
    names = list(runs)
    for name in names:
        warm(runs[name], warm_up)
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
        if (
            steady is not None
            and repeat + 1 >= min_repeats
            and all(Times(tuple(each)).is_steady(steady) for each in seconds.values())
        ):
            break
    return {name: Times(tuple(values)) for name, values in seconds.items()}


def warm(run: Callable[[], None], calls: int) -> None:
    """Call it so often, but a slow one once."""
    for _ in range(calls):
        started = time.perf_counter()
        run()
        if time.perf_counter() - started > SLOW:
            return


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
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    seconds = 0 if timeout is None else math.ceil(timeout)
    server.stdin.write(json.dumps({"case": asdict(case), "timeout": seconds, "threads": torch.get_num_threads()}))
    server.stdin.write("\n")
    server.stdin.flush()
    line = server.stdout.readline()
    if not line:
        _server.cache_clear()
        raise RuntimeError(f"measuring {case} failed: the process that starts others ended.")
    answer = json.loads(line)
    if answer["exit"] in (OUT_OF_MEMORY_EXIT, -signal.SIGKILL):  # ours, or the system's killer
        return Memory(None, None, "out of memory")
    if answer["exit"] == -signal.SIGALRM:
        return Memory(None, None, f"took longer than {seconds} s")
    if answer["exit"] != 0:
        raise RuntimeError(f"measuring {case} failed with exit code {answer['exit']}:\n{answer['said']}")
    return Memory(**json.loads(answer["said"]))


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


@cache
def _server() -> subprocess.Popen[str]:
    """Started when it is first asked, and ended with this process."""
    command = [sys.executable, "-m", "nystromformer.bench.measure"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    atexit.register(server.stdin.close)
    return server


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        attention = request["case"]["attention"]
        importlib.import_module(PRELOADED.get(attention, PEERS.get(attention, "nystromformer")))
        exit_code, said = _in_child(request)
        print(json.dumps({"exit": exit_code, "said": said}), flush=True)


def _in_child(request: dict) -> tuple[int, str]:
    """The exit code of a forked process, negative for a signal, and what it measured or complained of."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(request["timeout"])
        torch.set_num_threads(request["threads"])
        exit_code = 0
        try:
            said = json.dumps(asdict(_measure_here(Case(**request["case"]))))
        except BaseException as error:
            exit_code, said = OUT_OF_MEMORY_EXIT if is_out_of_memory(error) else 1, f"{type(error).__name__}: {error}"
        os.write(write, said.encode()[:4096])
        os._exit(exit_code)
    os.close(write)
    with open(read, encoding="utf-8", errors="replace") as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


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


class Kernels(TorchDispatchMode):
    """Lists what is dispatched and makes a tensor, a launch on a GPU each, without views and memory without content.

    >>> with Kernels() as kernels:
    ...     _ = (torch.ones(2, 3).T + 1).sum()
    >>> kernels.names
    ['aten.ones.default', 'aten.add.Tensor', 'aten.sum.default']
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.waiting: list[str] = []

    @property
    def count(self) -> int:
        return len(self.names)

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        if operation in WAITING:
            self.waiting.append(str(operation))
        makes_tensor = any(isinstance(x, torch.Tensor) for x in tree_leaves(out))
        if makes_tensor and not operation.is_view and operation not in NOTHING_LAUNCHED:
            self.names.append(str(operation))
        return out


if __name__ == "__main__":
    serve()
