"""Runs functions on several ranks: gloo on loopback, in processes forked from one server that has imported torch."""

import os
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist
from forked import SERVER

TIMEOUT = 60.0


def start_on_ranks(
    function: Callable[..., object], ranks: int, folder: Path, *args: object, timeout: float = TIMEOUT
) -> list[BaseProcess]:
    """Processes that run `function(*args)` in one group. What it returns goes to the file result-RANK, an error to
    failure-RANK, and its traceback to errors-RANK."""
    processes = [
        SERVER.Process(target=_run, args=(function, rank, ranks, folder, args, timeout), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def run_on_ranks(function: Callable[..., object], ranks: int, folder: Path, *args: object) -> list[object]:
    """What `function(*args)` returns on each rank: tensors, numbers and texts in lists and dicts."""
    processes = start_on_ranks(function, ranks, folder, *args)
    for process in processes:
        process.join()
    failures = [path.read_text() for path in sorted(folder.glob("failure-*"))]
    assert not failures, "\n".join(failures)
    assert [process.exitcode for process in processes] == [0] * ranks
    return [torch.load(folder / f"result-{rank}", weights_only=True) for rank in range(ranks)]


def sent_by_sockets() -> int:
    """Bytes that this process has sent over TCP so far, as the kernel counts them; what a busy receiver made it send
    again counts once."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                sent, again = struct.unpack_from("QQ", info, 200)  # tcpi_bytes_sent, tcpi_bytes_retrans
                total += sent - again
    return total


def _run(
    function: Callable[..., object], rank: int, ranks: int, folder: Path, args: tuple[object, ...], timeout: float
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    sys.stderr = open(folder / f"errors-{rank}", "w")  # noqa: SIM115, lives as long as the process
    try:
        meeting = f"file://{folder}/meeting"
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=limit)
        torch.save(function(*args), folder / f"result-{rank}")
        dist.destroy_process_group()
    except BaseException as error:
        (folder / f"failure-{rank}").write_text(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        raise
