"""Processes that load data under signals that reach all processes of a job. Runs: `tests/faults/test_interrupts.py`."""

import os
import signal

import pytest
from accelerate import Accelerator
from torch.utils.data import DataLoader, _utils

from nystromformer.training.shared.interrupts import SIGNALS, interrupts, leave_to_their_parent


def signal_all(number: int) -> None:
    """As from outside: what a process sends itself is not from its parent."""
    os.kill(os.getpid(), number)


def prepared(loader: DataLoader) -> DataLoader:
    """As training has it."""
    return Accelerator(cpu=True).prepare(loader)


@pytest.mark.parametrize("prepare", [lambda loader: loader, prepared], ids=["torch", "accelerate"])
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_data_worker_that_is_just_starting_serves_its_parent(number, prepare, monkeypatch, capfd):
    """After torch has set the handlers of a worker, before it calls anything of ours."""
    set_handlers = _utils.signal_handling._set_worker_signal_handlers

    def signalled():
        signal_all(number)
        set_handlers()
        signal_all(number)

    monkeypatch.setattr(_utils.signal_handling, "_set_worker_signal_handlers", signalled)
    loader = prepare(DataLoader(range(6), num_workers=2, worker_init_fn=lambda _: signal_all(number)))
    leave_to_their_parent(loader)
    with interrupts(save_seconds=600) as caught:
        assert [batch.item() for batch in loader] == list(range(6))
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set(), "the parent takes its signals itself"
        assert caught.signal == 0
        signal_all(number)
        assert caught.signal == number
    assert capfd.readouterr().err.count(number.name) == 1, "only the parent speaks"
