"""The contract of `nystrom_local_attention`: its values, masks, exactness, precision and gradients."""

from functools import partial

import drawn
import pytest
import torch
from drawn import EXTREMES, HALF_PRECISION_CASES, check_extreme_inputs, check_half_precision, draw, qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from nystromformer import build_attention, nystrom_attention
from nystromformer.attention import nystrom_local_attention
from nystromformer.attention.shared import partial_softmax

SIZES = {"num_landmarks": 8, "heavy_keys": 2, "block_size": 4, "chosen_blocks": 2, "core_rows": 8}
"""Small enough that a few dozen tokens are approximated."""

random_mask = partial(drawn.random_mask, share=0.7)


@pytest.fixture(params=["fused", "plain"], autouse=True)
def kernel(request, monkeypatch):
    """Everything holds with the fused kernel of CPUs and with the one that runs everywhere."""
    if request.param == "plain":
        monkeypatch.setattr(partial_softmax, "FUSED_DEVICES", ())
    return request.param


def chosen(query, key, block, number):
    """For each block the far ones with the most weight to the second order, as (g, g) of True and False."""
    blocks, scale = range(int(block[-1]) + 1), query.shape[1] ** -0.5
    found = torch.zeros(len(blocks), len(blocks), dtype=torch.bool)
    for i in blocks:
        own, weights = query[block == i], {}
        for j in blocks:
            keys = key[block == j]
            if abs(i - j) > 1:
                logits = scale * own @ keys.mean(0) + scale**2 / 2 * own.square() @ keys.var(0, correction=0)
                weights[j] = logits.mean() + torch.tensor(float(len(keys))).log()
        most = max(weights.values(), default=0)
        in_order = sorted(weights, key=lambda j: (-(weights[j] - most).exp().float().item(), j))
        found[i, in_order[:number]] = True
    return found


def oracle_head(query, key, value, num_landmarks, heavy_keys, block_size, chosen_blocks, core_rows, ridge=0.01):
    """The formulas of the module's docstring for one head of valid tokens (n, d), with dense matrices."""
    n, num_segments = len(query), num_landmarks - heavy_keys
    logits = query @ key.T / query.shape[1] ** 0.5
    rows = [(2 * i + 1) * n // (2 * core_rows) for i in range(core_rows)]
    B = torch.softmax(logits[rows], dim=1)
    column_means = B.mean(0).float().tolist()
    heavy = sorted(range(n), key=lambda j: (-column_means[j], j))[:heavy_keys]
    belongs = torch.zeros(num_segments, n, dtype=torch.float64)
    for i in set(range(n)) - set(heavy):
        belongs[i * num_segments // n, i] = 1
    c = belongs.sum(1)
    means = belongs / c.clamp(min=1)[:, None]
    block = torch.arange(n) // block_size
    near = (block[:, None] - block).abs() <= 1
    near |= chosen(query, key, block, chosen_blocks)[block][:, block]
    near[:, heavy] = False
    w = near.double() @ belongs.T
    to_segments = query @ (means @ key).T / query.shape[1] ** 0.5 + torch.log(c - w)
    P = torch.softmax(torch.cat((logits.masked_fill(~near, -torch.inf), to_segments, logits[:, heavy]), dim=1), dim=1)
    P_near, G = P[:, :n], P[:, n:]
    own = torch.cat((means @ value, value[heavy]))
    A = G[rows]
    R = B @ value - P_near[rows] @ value - A @ own
    ridge = ridge * ((A.T @ A).trace() / num_landmarks + 1e-6)
    correction = torch.linalg.solve(A.T @ A + ridge * torch.eye(A.shape[1], dtype=torch.float64), A.T @ R)
    return P_near @ value + G @ (own + correction)


def oracle(query, key, value, mask, **sizes):
    """Each example's valid tokens alone, then put back among zeros."""
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    for b in range(query.shape[0]):
        rows = slice(None) if mask is None else mask[b]
        for h in range(query.shape[1]):
            if mask is None or mask[b].any():
                out[b, h, rows] = oracle_head(query[b, h, rows], key[b, h, rows], value[b, h, rows], **sizes)
    return out


@st.composite
def cases(draw_from):
    integer = lambda low, high: draw_from(st.integers(low, high))
    b, h, n, m = integer(1, 3), integer(1, 3), integer(1, 60), integer(1, 20)
    sizes = {
        "num_landmarks": m,
        "heavy_keys": integer(0, m - 1),
        "block_size": integer(1, 12),
        "chosen_blocks": integer(0, 4),
        "core_rows": integer(1, 20),
    }
    share = draw_from(st.sampled_from([None, 0.0, 0.4, 0.9, 1.0]))
    mask = None if share is None else random_mask(b, n, integer(0, 2**31), share=share)
    return qkv(b, h, n, d=integer(1, 5), e=integer(1, 5)), mask, sizes


@settings(max_examples=150, deadline=None)
@given(cases())
def test_equals_the_formulas_on_each_examples_valid_tokens(case):
    tensors, mask, sizes = case
    ours = nystrom_local_attention(*tensors, mask, **sizes)
    torch.testing.assert_close(ours, oracle(*tensors, mask, **sizes), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize(
    "n, sizes",
    [
        (1, {}),
        (6, {"num_landmarks": 8, "heavy_keys": 2, "block_size": 1}),
        (48, {"block_size": 1}),
        (24, {"num_landmarks": 2, "heavy_keys": 1, "block_size": 12}),
        (24, {"num_landmarks": 2, "heavy_keys": 1, "block_size": 6, "chosen_blocks": 2}),
        (64, {}),
        (160, {"chosen_blocks": 3}),
    ],
)
def test_short_input_gives_exact_attention(n, sizes):
    """Also where the short example stands in a longer batch, so that nothing but its valid tokens can tell."""
    query, key, value = qkv(n=n)
    exact = scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(nystrom_local_attention(query, key, value, **sizes), exact)
    padded = [torch.cat((torch.full_like(x, 7), x, x.repeat(1, 1, 90 // n, 1)), dim=2) for x in (query, key, value)]
    mask = torch.zeros(2, padded[0].shape[2], dtype=torch.bool)
    mask[:, n : 2 * n] = True
    out = nystrom_local_attention(*padded, mask, **sizes)
    torch.testing.assert_close(out[:, :, n : 2 * n], exact)


def test_near_and_heavy_keys_are_kept_where_landmarks_blur_them():
    """Queries that look at their own place and at one sink far away: what trained heads do."""
    n = 512
    place = torch.nn.functional.normalize(draw(n, 64), dim=1)
    sink = torch.nn.functional.normalize(draw(1, 64, seed=5), dim=1)
    query = 100 * (place + 0.9 * sink)[None, None]
    key = place[None, None].clone()
    key[:, :, 17] = 1.1 * sink
    value = draw(1, 1, n, 64, seed=3)
    exact = scaled_dot_product_attention(query, key, value)
    error = lambda out: ((out - exact).norm() / exact.norm()).item()
    assert error(nystrom_local_attention(query, key, value)) < 0.02
    assert error(nystrom_attention(query, key, value)) > 0.3


@pytest.mark.parametrize("sizes", [SIZES, {**SIZES, "heavy_keys": 0}, {"num_landmarks": 200}], ids=str)
class TestIndependence:
    def setup_method(self):
        self.tensors, self.mask, self.kernel = qkv(b=3, n=70), random_mask(3, 70), draw(2, 5)

    def run(self, sizes, tensors=None, mask=None):
        mask = self.mask if mask is None else mask
        tensors = self.tensors if tensors is None else tensors
        return nystrom_local_attention(*tensors, mask, conv_weight=self.kernel, **sizes)

    def test_an_example_alone_and_in_any_batch_is_the_same(self, sizes):
        whole = self.run(sizes)
        for i in range(3):
            alone = self.run(sizes, [x[i : i + 1] for x in self.tensors], self.mask[i : i + 1])
            torch.testing.assert_close(alone, whole[i : i + 1], rtol=0, atol=1e-9)

    @pytest.mark.parametrize("content", [0.0, 1e6, float("nan"), float("inf"), -float("inf")])
    def test_what_padding_holds_changes_nothing_forward_or_backward(self, sizes, content):
        results = []
        for fill in (1.0, content):
            tensors = [torch.where(self.mask[:, None, :, None], x, fill).requires_grad_() for x in self.tensors]
            out = self.run(sizes, tensors)
            results.append([out, *torch.autograd.grad(out.sin().sum(), tensors)])
        for first, second in zip(*results, strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=1e-9)

    @pytest.mark.parametrize("front, back", [(0, 13), (21, 0), (5, 64)])
    def test_how_much_padding_there_is_changes_nothing(self, sizes, front, back):
        padded = [torch.nn.functional.pad(x, (0, 0, front, back), value=9) for x in self.tensors]
        out = self.run(sizes, padded, torch.nn.functional.pad(self.mask, (front, back)))
        torch.testing.assert_close(out[:, :, front : front + 70], self.run(sizes), rtol=0, atol=1e-9)

    def test_equal_keys_are_chosen_alike_however_much_padding_there_is(self, sizes):
        query, key, value = self.tensors
        key = key[:, :, :7].repeat(1, 1, 10, 1)
        padded = [torch.nn.functional.pad(x, (0, 0, 0, 50)) for x in (query, key, value)]
        out = self.run(sizes, padded, torch.nn.functional.pad(self.mask, (0, 50)))
        torch.testing.assert_close(out[:, :, :70], self.run(sizes, (query, key, value)), rtol=0, atol=1e-9)

    def test_masked_rows_are_exactly_zero(self, sizes):
        out = self.run(sizes).transpose(1, 2)
        assert (out[~self.mask] == 0).all()
        assert (out[self.mask] != 0).any(dim=-1).all()

    def test_an_example_without_valid_tokens_gives_zeros_and_finite_gradients(self, sizes):
        mask = self.mask.clone()
        mask[1] = False
        tensors = [x.clone().requires_grad_() for x in self.tensors]
        out = self.run(sizes, tensors, mask)
        assert (out[1] == 0).all()
        out.square().sum().backward()
        assert all(x.grad.isfinite().all() and (x.grad[1] == 0).all() for x in tensors)

    def test_a_broken_example_does_not_spoil_the_others(self, sizes):
        broken = [x.clone() for x in self.tensors]
        for x in broken:
            x[1] = float("nan")
        out, expected = self.run(sizes, broken), self.run(sizes)
        torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], rtol=0, atol=1e-9)


def test_scale_multiplies_the_logits():
    query, key, value = qkv()
    half = nystrom_local_attention(query, key, value, scale=0.25, **SIZES)
    torch.testing.assert_close(half, nystrom_local_attention(query / 2, key, value, **SIZES))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("heavy_keys, block_size, conv", [(2, 3, True), (0, 2, False), (5, 1, False)])
def test_gradients_are_right(heavy_keys, block_size, conv, masked):
    tensors = [x.requires_grad_() for x in qkv(h=1, n=17, d=2, e=1)]
    if conv:
        tensors.append(draw(1, 3).requires_grad_())
    mask = random_mask(2, 17) if masked else None
    sizes = {"num_landmarks": 7, "heavy_keys": heavy_keys, "block_size": block_size, "core_rows": 5}

    def run(query, key, value, kernel=None):
        return nystrom_local_attention(query, key, value, mask, conv_weight=kernel, **sizes)

    assert torch.autograd.gradcheck(run, tensors)


@HALF_PRECISION_CASES
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_half_precision_is_within_two_percent_of_float32(dtype, masked, n, m, spread):
    tensors = [x.to(dtype) for x in qkv(n=n, d=32, spread=spread, dtype=torch.float32)]
    mask = random_mask(2, n) if masked else None
    check_half_precision(lambda *own: nystrom_local_attention(*own, mask, num_landmarks=m), tensors, dtype)


def test_autocast_does_not_reach_the_approximation():
    tensors = qkv(n=256, d=16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = nystrom_local_attention(*tensors, num_landmarks=32)
        half = nystrom_local_attention(*(x.bfloat16() for x in tensors), num_landmarks=32)
    outside = nystrom_local_attention(*tensors, num_landmarks=32)
    assert torch.equal(inside, outside)
    assert (half.float() - outside).norm() < 0.02 * outside.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_inputs_stay_finite(kind, dtype):
    check_extreme_inputs(partial(nystrom_local_attention, num_landmarks=16, block_size=8), kind, dtype, n=150)


@pytest.mark.parametrize("n", [40, 43])
def test_inputs_in_any_memory_layout_give_the_same(n):
    results = []
    for layout in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (2, 1, 3, 0)):
        back = [layout.index(axis) for axis in range(4)]
        tensors = [x.permute(layout).contiguous().permute(back).requires_grad_() for x in qkv(n=n)]
        out = nystrom_local_attention(*tensors, **SIZES)
        weight = draw(*out.shape).permute(layout).contiguous().permute(back)
        results.append([out, *torch.autograd.grad(out, tensors, weight)])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            torch.testing.assert_close(first, second)


def test_inputs_are_left_as_they_were():
    tensors, mask = qkv(), random_mask(2, 40)
    copies = [x.clone() for x in tensors]
    with torch.no_grad():
        for some in (None, mask):
            nystrom_local_attention(*tensors, some, conv_weight=draw(2, 5), **SIZES)
            nystrom_local_attention(*tensors, some, conv_weight=draw(2, 5))
    assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True))


def test_the_table_builds_it_with_a_suffix_or_options():
    attention = build_attention("nystrom-local-32", num_heads=2, head_dim=4, block_size=8)
    tensors, mask = qkv(n=100), random_mask(2, 100)
    assert not list(attention.parameters())
    expected = nystrom_local_attention(*tensors, mask, num_landmarks=32, block_size=8)
    assert torch.equal(attention(*tensors, mask), expected)
    with_conv = build_attention("nystrom-local", num_heads=2, head_dim=4, conv_kernel_size=5).double()
    assert with_conv.conv.weight.shape == (2, 1, 5, 1)
    with_conv(*tensors, mask).sum().backward()
    assert with_conv.conv.weight.grad.abs().sum() > 0
