"""Training states go through safetensors and come back as they were."""

import random

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from nystromformer.training.checkpoints import generators_state, load_state, save_state, set_generators


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
