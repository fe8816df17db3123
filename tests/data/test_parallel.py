"""Work shared out to processes."""

import os
import signal
import subprocess
import sys
import time

import pytest

from nystromformer.data.parallel import in_order, usable_cores

ENDLESS = """
import itertools, os, time
from nystromformer.data.parallel import in_order

def work(piece):
    return os.getpid()

if __name__ == "__main__":
    for worker in in_order(work, itertools.count(), workers=1 + 1):
        print(worker, flush=True)
        time.sleep(0.2)
"""


def test_one_worker_needs_no_process():
    assert list(in_order(lambda piece: (piece, os.getpid()), range(3), workers=1)) == [
        (i, os.getpid()) for i in range(3)
    ]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no process to cores")
def test_a_process_that_was_given_one_core_starts_no_others():
    given = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(given)})
    try:
        assert usable_cores() == 1
        assert list(in_order(lambda piece: os.getpid(), range(2))) == [os.getpid()] * 2
    finally:
        os.sched_setaffinity(0, given)


@pytest.mark.slow
def test_workers_end_with_a_process_that_is_killed(tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    worker = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{worker}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{worker}")
