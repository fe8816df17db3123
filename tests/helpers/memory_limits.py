"""Runs with little memory: `python memory_limits.py JOB FOLDER` asserts that they end in one line, and lose nothing."""

import resource
import sys
from functools import partial
from pathlib import Path

import broken_runs

from nystromformer.cli import main

ROOM = (8_000_000, 40_000_000)
"""Bytes beyond what the imports take."""


def limited(folder: Path, given: list[str], room: int) -> int:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    broken_runs.enter(folder, given)
    return main(given)


def check(job: str, place: Path) -> None:
    broken_runs.import_all()  # which takes memory of its own
    broken_runs.in_a_fork(lambda: broken_runs.prepare(place) or 0, place / "prepare.log")
    given = broken_runs.COMMANDS[job]
    assert broken_runs.run(place / "whole", given) == 0, (place / "whole.log").read_text()
    whole, codes = broken_runs.contents(place / "whole"), []
    for room in ROOM:
        folder = place / str(room)
        work = partial(limited, folder, given, room)
        codes.append(broken_runs.in_a_fork(work, place / "log"))
        printed = (place / "log").read_text()
        if codes[-1]:
            assert codes[-1] == 2, printed
            assert "Traceback" not in printed
            assert len([line for line in printed.splitlines() if line.startswith("nystromformer: ")]) == 1
        assert broken_runs.run(folder, [*given, "--resume"]) == 0
        assert broken_runs.difference(whole, broken_runs.contents(folder)) is None
    assert any(codes), "so little never suffices"


if __name__ == "__main__":
    check(sys.argv[1], Path(sys.argv[2]))
