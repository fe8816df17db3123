"""A killed and resumed run has the weights of one that was never interrupted, to the bit, and states come back."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import launch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from training_runs import Killed, make_trainer

from nystromformer.training.run import (
    checkpoint_folder,
    damage_of_checkpoint,
    generators_state,
    last_checkpoint,
    load_state,
    save_state,
    set_generators,
    steps_saved,
    train,
    trainer_state,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run with the given settings, made once."""
    runs: dict[str, Path] = {}

    def run(**settings: object) -> Path:
        key = repr(sorted(settings.items()))
        if key not in runs:
            runs[key] = tmp_path_factory.mktemp("whole")
            train(make_trainer(runs[key], **settings))
        return runs[key]

    return run


def last_weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint_folder(out, 16) / "model.safetensors")


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill_at, settings",
    [
        (5, {}),  # within the first epoch of 9 batches: resumes from step 3
        (9, {}),  # at the end of an epoch, before its checkpoint: resumes from step 6
        (13, {}),  # within the second epoch: resumes from step 12
        (8, {"dataloader_num_workers": 2}),
        (8, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}),
        (14, {"attention": "reformer-1"}),  # draws random numbers of its own
        (2, {}),  # before the first checkpoint: starts anew
    ],
    ids=["first-epoch", "epoch-end", "second-epoch", "workers", "accumulation", "random-attention", "no-checkpoint"],
)
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(tmp_path, whole, kill_at, settings):
    with pytest.raises(Killed):
        train(make_trainer(tmp_path, kill_at, **settings))
    train(make_trainer(tmp_path, **settings))
    assert_same(last_weights(whole(**settings)), last_weights(tmp_path))
    states = [trainer_state(last_checkpoint(folder)) for folder in (whole(**settings), tmp_path)]
    assert states[0]["best_metric"] == states[1]["best_metric"]
    assert states[0]["best_global_step"] == states[1]["best_global_step"]


@pytest.mark.slow
def test_a_run_killed_while_it_wrote_a_checkpoint_goes_on_from_the_one_before(tmp_path, whole, monkeypatch):
    def killed(*_):
        raise Killed

    trainer = make_trainer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("nystromformer.files.os.replace", killed_at("checkpoint-6", killed))
        with pytest.raises(Killed):
            train(trainer)
    assert steps_saved(tmp_path) == [3], "what is not whole is not there"
    train(make_trainer(tmp_path))
    assert_same(last_weights(whole()), last_weights(tmp_path))


def killed_at(name, killed):
    def replace(source, target):
        if target.name == name:
            killed()
        os.rename(source, target)

    return replace


def test_a_run_killed_after_its_last_step_takes_no_further_one(tmp_path):
    whole = make_trainer(tmp_path)
    train(whole)
    again = make_trainer(tmp_path)
    train(again)
    assert again.state.global_step == 16
    assert_same(whole.model.state_dict(), again.model.state_dict())
    assert again.state.best_metric == whole.state.best_metric


def test_checkpoints_hold_no_pickle_and_only_the_last_two_and_the_best_are_kept(whole):
    out = whole()
    assert set(steps_saved(out)) == {15, 16, trainer_state(last_checkpoint(out))["best_global_step"]}
    files = {path.name for path in checkpoint_folder(out, 16).iterdir()}
    assert files == {
        "checksums.json",
        "config.json",
        "model.safetensors",
        "process_0.safetensors",
        "trainer_state.json",
        "training_args.json",
        "training_state.safetensors",
    }


@pytest.mark.slow
def test_a_truncated_checkpoint_is_passed_over_with_a_warning(tmp_path, whole):
    with pytest.raises(Killed):
        train(make_trainer(tmp_path, 13))
    checkpoint = checkpoint_folder(tmp_path, 12)
    for file in ("model.safetensors", "training_state.safetensors", "trainer_state.json"):
        content = (checkpoint / file).read_bytes()
        (checkpoint / file).write_bytes(content[: len(content) // 2])
        assert damage_of_checkpoint(checkpoint) is not None
        (checkpoint / file).write_bytes(content)
        assert damage_of_checkpoint(checkpoint) is None
    (checkpoint / "training_state.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="checkpoint-12 is damaged .*: resuming from the one before"):
        train(make_trainer(tmp_path))
    assert_same(last_weights(whole()), last_weights(tmp_path))


@pytest.mark.slow
def test_a_full_disk_costs_a_checkpoint_and_nothing_else(tmp_path, whole, monkeypatch):
    expected = last_weights(whole())  # before the disk is full

    def no_space(path, state):
        if path.parent.name.startswith(".checkpoint-12."):
            raise OSError(28, "No space left on device")
        save_state(path, state)

    monkeypatch.setattr("nystromformer.training.trainer.save_state", no_space)
    with pytest.warns(UserWarning, match="checkpoint-12 can't be written .*No space left.*: training continues"):  # noqa: SIM117
        with pytest.raises(Killed):
            train(make_trainer(tmp_path, 13))
    assert steps_saved(tmp_path)[-1] == 9
    assert not list(tmp_path.glob(".checkpoint-*"))
    train(make_trainer(tmp_path))
    assert_same(expected, last_weights(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("save_steps", [3, 15])
def test_the_best_model_is_the_one_left_even_between_regular_checkpoints(tmp_path, save_steps):
    trainer = make_trainer(tmp_path, save_steps=save_steps)
    train(trainer)
    assert trainer.state.best_global_step < 15
    best = load_file(checkpoint_folder(tmp_path, trainer.state.best_global_step) / "model.safetensors")
    assert_same(best, trainer.model.state_dict())
    assert trainer.evaluate()["eval_accuracy"] == trainer.state.best_metric


@pytest.mark.slow
def test_resuming_is_exact_on_two_processes(tmp_path):
    """Killed within the second epoch, where an order that lost its epoch would show."""
    code = "import sys; from training_runs import whole_and_killed; whole_and_killed(sys.argv[1])"
    done = launch(code, [tmp_path], tmp_path, processes=2)
    assert done.codes == [0, 0], done.err
    assert_same(last_weights(tmp_path / "whole"), last_weights(tmp_path / "killed"))


def back(tmp_path, state):
    save_state(tmp_path / "state.safetensors", state)
    return load_state(tmp_path / "state.safetensors")


@pytest.mark.parametrize("make_optimizer", [torch.optim.AdamW, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)])
@pytest.mark.parametrize("make_scheduler", [lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
                                            lambda o: OneCycleLR(o, 0.1, total_steps=10)])  # fmt: skip
def test_optimizers_and_schedulers_come_back(tmp_path, make_optimizer, make_scheduler):
    layer = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(layer.parameters(), lr=0.1)
    scheduler = make_scheduler(optimizer)
    for _ in range(3):
        layer(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    loaded = back(tmp_path, {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    assert_equal(loaded["optimizer"], optimizer.state_dict())
    assert_equal(loaded["scheduler"], scheduler.state_dict())


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        assert one == other


def test_generators_go_on_where_they_were(tmp_path):
    def draw():
        return random.random(), np.random.random(), torch.rand(2).tolist()

    draw()
    random.gauss(0, 1)  # leaves half a pair for the next call
    state = back(tmp_path, generators_state())
    expected = draw()
    draw()
    set_generators(state)
    assert draw() == expected


def test_tensors_that_share_memory_are_stored(tmp_path):
    tensor = torch.arange(6.0)
    loaded = back(tmp_path, [tensor, tensor[2:], tensor.view(2, 3).T])
    assert [part.tolist() for part in loaded] == [tensor.tolist(), tensor[2:].tolist(), tensor.view(2, 3).T.tolist()]


def test_what_can_not_be_stored_is_refused(tmp_path):
    with pytest.raises(TypeError, match="a function in a training state: only plain values"):
        save_state(tmp_path / "state.safetensors", {"hook": lambda: None})
    assert not (tmp_path / "state.safetensors").exists()
