"""Peak memory of one call, in a fresh process of its own.

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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import torch

from nystromformer.bench.cases import Case, prepare
from nystromformer.paper import PEERS

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
    command = [sys.executable, "-m", "nystromformer.bench.memory"]
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


if __name__ == "__main__":
    serve()
