"""Blocks of queries with shared keys: what the same keys give when each block has its own copy."""

import pytest
import torch

from nystromformer.attention import partial_softmax
from nystromformer.attention.partial_softmax import attention_with_lse, shared_part, window_part

NUMBER, HEADS, BLOCK, WIDTH, SCALE = 7, 3, 4, 5, 0.4


@pytest.fixture(params=["fused", "plain"], autouse=True)
def kernel(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(partial_softmax, "FUSED_DEVICES", ())


@pytest.fixture(params=[1, 3, 100], ids=["one by one", "three at once", "all at once"], autouse=True)
def blocks_at_once(request, monkeypatch):
    monkeypatch.setattr(partial_softmax, "BLOCKS_AT_ONCE", request.param)


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def shared(query, key, value, bias):
    return shared_part(query, key, value, bias, SCALE)


def shared_copies(query, key, value, bias):
    return attention_with_lse(query, *(torch.stack([x] * NUMBER) for x in (key, value)), bias, SCALE)


def windowed(query, key, value, bias):
    return window_part(query, key, value, bias, SCALE, BLOCK)


def windowed_copies(query, key, value, bias):
    starts = range(0, NUMBER * BLOCK, BLOCK)
    copies = (torch.stack([x[i : i + 3 * BLOCK].transpose(0, 1) for i in starts]) for x in (key, value))
    return attention_with_lse(query, *copies, bias, SCALE)


CASES = {
    "shared": (shared, shared_copies, (HEADS, 6, WIDTH), 6),
    "windows": (windowed, windowed_copies, ((NUMBER + 2) * BLOCK, HEADS, WIDTH), 3 * BLOCK),
}


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_those_of_copies(case, dtype):
    ours, copies, shape, seen = CASES[case]
    inputs = [draw(NUMBER, HEADS, BLOCK, WIDTH, seed=1), draw(*shape, seed=2), draw(*shape, seed=3)]
    bias = draw(NUMBER, HEADS, 1, seen, seed=4, dtype=torch.promote_types(dtype, torch.float32))
    results = []
    for function in (ours, copies):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out, logsumexp = function(*leaves, bias)
        upstream = (draw(*out.shape, seed=5, dtype=dtype), draw(*logsumexp.shape, seed=6, dtype=logsumexp.dtype))
        results.append([out, logsumexp, *torch.autograd.grad((out, logsumexp), leaves, upstream)])
    tolerance = {"rtol": 0.05, "atol": 0.1} if dtype is torch.bfloat16 else {}
    for first, second in zip(*results, strict=True):
        assert first.dtype == second.dtype
        torch.testing.assert_close(first, second, **tolerance)


@pytest.mark.parametrize("case", list(CASES))
def test_keys_are_not_copied_for_the_backward(case):
    function, _, shape, seen = CASES[case]
    query, key, value = (draw(*size, seed=1) for size in ((NUMBER, HEADS, BLOCK, WIDTH), shape, shape))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        function(query.requires_grad_(), key, value, torch.zeros(NUMBER, HEADS, 1, seen, dtype=torch.float64))
    assert max(saved) <= 8 * max(query.numel(), key.numel(), NUMBER * HEADS * seen)
