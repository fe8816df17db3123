"""Parts of one softmax, for all queries or for blocks: outputs, log-sum-exps and gradients, with either kernel."""

import pytest
import torch

from nystromformer.attention.shared import partial_softmax
from nystromformer.attention.shared.partial_softmax import MASKED, attention_with_lse, merge, shared_part, window_part


@pytest.fixture(params=["fused", "plain"], autouse=True)
def kernel(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(partial_softmax, "FUSED_DEVICES", ())
    return request.param


def tensors(n=5, s=7, d=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, n, d), (2, 3, s, d), (2, 3, s, d), (2, 3, 1, s)]
    *qkv, bias = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return [x.requires_grad_() for x in qkv], bias


def dense(query, key, value, bias, scale=0.3):
    logits = scale * query @ key.mT + bias
    return torch.softmax(logits, -1) @ value, torch.logsumexp(logits, -1)


def test_output_logsumexp_and_gradients_equal_the_dense_ones():
    qkv, bias = tensors()
    results = []
    for function in (attention_with_lse, dense):
        out, logsumexp = function(*qkv, bias, scale=0.3)
        gradients = torch.autograd.grad((out * out.detach().sin()).sum() + logsumexp.square().sum(), qkv)
        results.append((out, logsumexp, *gradients))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("share", [0.0, 1e-30, 1e-14, 1.0])
def test_the_logsumexp_has_its_gradient_whatever_that_of_the_output_is(share):
    """The fused backward knows of no log-sum-exp: it enters by way of the output's gradient, which may be 0."""
    qkv, bias = tensors()
    weight = torch.linspace(-1, 1, 30, dtype=torch.float64).view(2, 3, 5, 1)
    results = []
    for function in (attention_with_lse, dense):
        out, logsumexp = function(*qkv, bias, scale=0.3)
        results.append(torch.autograd.grad((share * weight * out).sum() + (weight[..., 0] * logsumexp).sum(), qkv))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-7, atol=1e-12)


def test_gradients_of_any_size_and_layout_are_right():
    qkv, bias = tensors(dtype=torch.float32)
    out, logsumexp = attention_with_lse(*qkv, bias, scale=0.3)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    expected = torch.autograd.grad(out, qkv, weight, retain_graph=True)
    for size in (1e-30, 1e-20, 1e20):
        for layout in (weight, weight.mT.contiguous().mT, weight.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)):
            ours = torch.autograd.grad(out, qkv, size * layout, retain_graph=True)
            for x, y in zip(ours, expected, strict=True):
                torch.testing.assert_close(x / size, y, rtol=1e-4, atol=1e-5)
    assert all((g == 0).all() for g in torch.autograd.grad((out, logsumexp), qkv, (0 * weight, 0 * logsumexp)))


def test_merged_parts_are_one_softmax():
    (query, key, value), bias = tensors(s=9)
    parts = [attention_with_lse(query, key[:, :, some], value[:, :, some], bias[..., some], 0.3) for some in
             (slice(0, 4), slice(4, 9))]  # fmt: skip
    merged = merge(*parts)
    expected, _ = dense(query, key, value, bias)
    torch.testing.assert_close(merged, expected)
    for ours, theirs in zip(
        torch.autograd.grad(merged.sin().sum(), (query, key, value)),
        torch.autograd.grad(expected.sin().sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_part_without_keys_loses_every_merge_and_stays_finite(dtype):
    qkv, bias = tensors()
    query, key, value = (x.detach().to(dtype).requires_grad_() for x in qkv)
    bias = bias.to(torch.promote_types(dtype, torch.float32))
    nothing = attention_with_lse(query, key, value, torch.full_like(bias, MASKED), 0.3)
    some = attention_with_lse(query, key, value, bias, 0.3)
    for merged in (merge(nothing, some), merge(some, nothing)):
        torch.testing.assert_close(merged, some[0])
        gradients = torch.autograd.grad(merged.sum(), (query, key, value), retain_graph=True)
        assert all(g.isfinite().all() for g in gradients)
    assert merge(nothing, nothing).isfinite().all()


NUMBER, HEADS, BLOCK, WIDTH, SCALE = 7, 3, 4, 5, 0.4


@pytest.fixture(params=[1, 3, 100], ids=["one by one", "three at once", "all at once"])
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
def test_values_and_gradients_of_blocks_are_those_of_copies(case, dtype, blocks_at_once):
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
def test_keys_of_blocks_are_not_copied_for_the_backward(case, blocks_at_once):
    function, _, shape, seen = CASES[case]
    query, key, value = (draw(*size, seed=1) for size in ((NUMBER, HEADS, BLOCK, WIDTH), shape, shape))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.untyped_storage().nbytes()) or x, lambda x: x
    ):
        function(query.requires_grad_(), key, value, torch.zeros(NUMBER, HEADS, 1, seen, dtype=torch.float64))
    assert max(saved) <= 8 * max(query.numel(), key.numel(), NUMBER * HEADS * seen)
