"""Processes forked from a server that has imported everything: a command in a process of its own without its imports.

One server serves all tests of a test process, those on several ranks (`ranks.py`), too.
"""

import multiprocessing
import os
import socket
import sys
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "accelerate",
        "torch.utils.tensorboard",
        "transformers.models.bert.modeling_bert",
        "nystromformer.cli",
        "nystromformer.distributed.encoder",
        "nystromformer.training.finetuning.sweep",
        "nystromformer.training.lra",
        "nystromformer.training.pretraining",
    ]
)
COMMAND = "from nystromformer.cli import entry; entry()"
"""The command line."""
LONGEST = 600.0
"""Seconds: a process that takes longer is ended, and its test fails."""


@dataclass
class Launched:
    codes: list[int]
    """Exit codes, by rank."""
    out: str
    err: str


def start(code: str, arguments: list[str], folder: Path, processes: int = 1) -> list[BaseProcess]:
    """Processes that run some Python with arguments, in a group as `torchrun` makes it. They print to files.

    In the folder, as the current one, each has its files stdout-RANK and stderr-RANK.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        forkserver.ensure_running()
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(processes)}
    places = [group | {"LOCAL_WORLD_SIZE": str(processes), "RANK": str(rank), "LOCAL_RANK": str(rank)}
              for rank in range(processes)] if processes > 1 else [{}]  # fmt: skip
    started = [
        SERVER.Process(target=_run, args=(code, [str(each) for each in arguments], folder, place)) for place in places
    ]
    for process in started:
        process.start()
    return started


def launch(
    code: str, arguments: list[str], folder: Path, processes: int = 1, longest: float | None = LONGEST
) -> Launched:
    """The same to their end, or for so many seconds; `None` waits as long as it takes."""
    started = start(code, arguments, folder, processes)
    for process in started:
        process.join(longest)
    for process in started:
        process.kill()
        process.join()
    out, err = (
        "".join((folder / f"{stream}-{rank}").read_text() for rank in range(processes))
        for stream in ("stdout", "stderr")
    )
    return Launched([process.exitcode or 0 for process in started], out, err)


def _run(code: str, arguments: list[str], folder: Path, place: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ |= place
    for handle, stream in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{stream}-{place.get('RANK', 0)}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, handle)
        os.close(file)
    sys.argv = ["nystromformer", *arguments]
    exec(code, {"__name__": "__main__"})


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
