"""The contract of `nystrom_attention`: its values, masks, exactness, precision and gradients."""

from functools import partial

import oracles
import pytest
import torch
from drawn import EXTREMES, HALF_PRECISION_CASES, check_extreme_inputs, check_half_precision, draw, qkv, random_mask
from hypothesis import given, settings
from hypothesis import strategies as st

from nystromformer import nystrom_attention, nystrom_attention_weights


@st.composite
def cases(draw_from):
    integer = lambda low, high: draw_from(st.integers(low, high))
    b, h, n, m = integer(1, 3), integer(1, 3), integer(1, 30), integer(1, 35)
    s = n if draw_from(st.booleans()) else integer(1, 30)
    kinds = ["none", "both", "same"] if n == s else ["none", "both", "key", "query"]
    kind, seed = draw_from(st.sampled_from(kinds)), integer(0, 2**31)
    key_mask = random_mask(b, s, seed, share=draw_from(st.sampled_from([0.0, 0.3, 0.9])))
    query_mask = random_mask(b, n, seed + 1)
    masks = {
        "none": {},
        "both": {"query_mask": query_mask, "key_mask": key_mask},
        "key": {"key_mask": key_mask},
        "query": {"query_mask": query_mask},
        "same": {"mask": key_mask},
    }
    return {
        "tensors": qkv(b, h, n, d=integer(1, 5), e=integer(1, 5), s=s),
        "m": m,
        "masks": masks[kind],
        "kernel": draw(h, draw_from(st.sampled_from([1, 3, 7]))) if n == s and draw_from(st.booleans()) else None,
    }


@settings(max_examples=150, deadline=None)
@given(cases())
def test_equals_the_papers_formula_on_each_examples_valid_tokens(case):
    tensors, m, masks, kernel = case.values()
    ours = nystrom_attention(*tensors, **masks, num_landmarks=m, conv_weight=kernel)
    query_mask, key_mask = (masks.get(name, masks.get("mask")) for name in ("query_mask", "key_mask"))
    torch.testing.assert_close(ours, oracles.nystrom(*tensors, m, query_mask, key_mask, kernel), rtol=1e-7, atol=1e-8)


@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from(["segment_means", "kmeans"]))
def test_weights_times_values_are_the_rows_of_the_output(case, landmarks):
    (query, key, value), m, masks, _ = case.values()
    options = {**masks, "num_landmarks": m, "landmarks": landmarks}
    weights = nystrom_attention_weights(query, key, range(query.shape[2]), **options)
    torch.testing.assert_close(weights @ value, nystrom_attention(query, key, value, **options), rtol=1e-7, atol=1e-8)


def test_weights_select_and_count_rows_from_the_end():
    query, key, _ = qkv(n=50)
    every = nystrom_attention_weights(query, key, rows=range(50), num_landmarks=8)
    some = nystrom_attention_weights(query, key, rows=torch.tensor([3, -1]), num_landmarks=8)
    torch.testing.assert_close(some, every[:, :, [3, 49]])


@pytest.mark.parametrize("landmarks", ["segment_means", "kmeans"])
@pytest.mark.parametrize("n, s", [(7, 50), (50, 7), (12, 12), (1, 1), (1, 50), (50, 1)])
def test_at_most_m_keys_or_queries_give_exact_attention(n, s, landmarks):
    query, key, value = qkv(n=n, s=s)
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(nystrom_attention(query, key, value, num_landmarks=12, landmarks=landmarks), exact)


@pytest.mark.parametrize("landmarks", ["segment_means", "kmeans"])
def test_exactness_is_decided_for_each_example_by_its_valid_tokens(landmarks):
    """Lemma 2: where landmarks are the tokens, the approximation is the true attention. Duplicate keys included."""
    query, key, value = qkv(b=3, n=60)
    key[:, :, 1::2] = key[:, :, ::2]
    key_mask = torch.ones(3, 60, dtype=torch.bool)
    key_mask[0] = random_mask(1, 60, share=0.1)
    query_mask = torch.ones(3, 60, dtype=torch.bool)
    query_mask[1, 5:] = False
    out = nystrom_attention(
        query, key, value, num_landmarks=16, query_mask=query_mask, key_mask=key_mask, landmarks=landmarks
    )
    bias = key_mask[:, None, None]
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    exact = exact.masked_fill(~query_mask[:, None, :, None], 0)
    torch.testing.assert_close(out[:2], exact[:2])
    assert (out[2] - exact[2]).abs().max() > 1e-3  # the third has more than m of both


def test_more_landmarks_than_tokens_change_nothing():
    query, key, value = qkv(n=20)
    torch.testing.assert_close(
        nystrom_attention(query, key, value, num_landmarks=20), nystrom_attention(query, key, value, num_landmarks=1000)
    )


@pytest.mark.parametrize("landmarks", ["segment_means", "kmeans"])
@pytest.mark.parametrize("m", [4, 16, 200])
class TestIndependence:
    def setup_method(self):
        self.query, self.key, self.value = qkv(b=3, n=70)
        self.mask = random_mask(3, 70)
        self.kernel = draw(2, 5)

    def run(self, m, landmarks, query=None, key=None, value=None, mask=None):
        tensors = [self.query if query is None else query, self.key if key is None else key]
        tensors.append(self.value if value is None else value)
        mask = self.mask if mask is None else mask
        return nystrom_attention(*tensors, mask, num_landmarks=m, conv_weight=self.kernel, landmarks=landmarks)

    def test_an_example_alone_and_in_any_batch_is_the_same(self, m, landmarks):
        whole = self.run(m, landmarks)
        for i in range(3):
            alone = [x[i : i + 1] for x in (self.query, self.key, self.value, self.mask)]
            torch.testing.assert_close(self.run(m, landmarks, *alone), whole[i : i + 1], rtol=0, atol=1e-9)

    @pytest.mark.parametrize("content", [0.0, 1e6, float("nan"), float("inf"), -float("inf")])
    def test_what_padding_holds_changes_nothing_forward_or_backward(self, m, landmarks, content):
        gradients = []
        for fill in (1.0, content):
            tensors = [
                torch.where(self.mask[:, None, :, None], x, fill).requires_grad_()
                for x in (self.query, self.key, self.value)
            ]
            out = self.run(m, landmarks, *tensors)
            gradients.append([out, *torch.autograd.grad(out.sin().sum(), tensors)])
        for first, second in zip(*gradients, strict=True):
            torch.testing.assert_close(first, second, rtol=0, atol=1e-9)

    def test_how_much_padding_there_is_changes_nothing(self, m, landmarks):
        def longer(x, front, back):
            return torch.cat([torch.full_like(x[:, :, :front], 9), x, torch.full_like(x[:, :, :back], 9)], dim=2)

        for front, back in [(0, 13), (21, 0), (5, 64)]:
            padded = [longer(x, front, back) for x in (self.query, self.key, self.value)]
            mask = torch.nn.functional.pad(self.mask, (front, back))
            out = self.run(m, landmarks, *padded, mask=mask)
            torch.testing.assert_close(out[:, :, front : front + 70], self.run(m, landmarks), rtol=0, atol=1e-9)

    def test_masked_rows_are_exactly_zero(self, m, landmarks):
        out = self.run(m, landmarks)
        assert (out.transpose(1, 2)[~self.mask] == 0).all()
        assert (out.transpose(1, 2)[self.mask] != 0).any(dim=-1).all()

    def test_without_a_valid_key_the_output_is_zero_and_gradients_are_finite(self, m, landmarks):
        mask = self.mask.clone()
        mask[1] = False
        tensors = [x.clone().requires_grad_() for x in (self.query, self.key, self.value)]
        query_mask = torch.ones_like(mask)  # queries are there, keys are not
        out = nystrom_attention(*tensors, num_landmarks=m, query_mask=query_mask, key_mask=mask, landmarks=landmarks)
        assert (out[1] == 0).all()
        out.square().sum().backward()
        assert all(x.grad.isfinite().all() for x in tensors)


@pytest.mark.parametrize("pinv", ["iterative", "exact"])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_a_broken_example_does_not_spoil_the_others(pinv, masked):
    tensors, mask = qkv(b=3, n=70), random_mask(3, 70) if masked else None
    broken = [x.clone() for x in tensors]
    for x in broken:
        x[1] = float("nan")
    run = lambda tensors: nystrom_attention(*tensors, mask, num_landmarks=8, pinv=pinv)
    torch.testing.assert_close(run(broken)[[0, 2]], run(tensors)[[0, 2]], rtol=0, atol=1e-9)


def test_batch_scaling_is_what_published_code_does_and_depends_on_the_batch():
    query, key, value = qkv(b=2, n=64, spread=3)
    whole = nystrom_attention(query, key, value, num_landmarks=8, pinv_scaling="batch")
    alone = nystrom_attention(query[:1], key[:1], value[:1], num_landmarks=8, pinv_scaling="batch")
    assert (whole[:1] - alone).abs().max() > 1e-6


@pytest.mark.parametrize(
    "options, bound", [({"landmarks": "kmeans"}, 0.05), ({"pinv": "exact"}, 0.005), ({"pinv_iterations": 20}, 0.005)]
)
def test_options_come_closer_to_exact_attention_where_it_is_smooth(options, bound):
    """The mean of all values, which is what attention that sees nothing gives, is the error to compare with."""
    query, key, value = qkv(n=128, d=8, spread=0.25)
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    error = lambda out: ((out - exact).norm() / exact.norm()).item()
    plain, other = (
        nystrom_attention(query, key, value, num_landmarks=64),
        nystrom_attention(query, key, value, num_landmarks=64, **options),
    )
    assert error(other) < bound < 0.9 * error(plain) < 0.8 * error(value.mean(2, keepdim=True))


def test_scale_multiplies_the_logits():
    query, key, value = qkv(n=40)
    torch.testing.assert_close(
        nystrom_attention(query, key, value, num_landmarks=8, scale=0.25),
        nystrom_attention(query / 2, key, value, num_landmarks=8),
    )


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize(
    "n, s, m, conv",  # a convolution adds to each query what is at its own place, so that there must be as many keys
    [(11, 11, 4, False), (11, 11, 4, True), (5, 5, 8, False), (5, 5, 8, True), (9, 14, 4, False), (3, 9, 4, False)],
)
def test_gradients_are_right(n, s, m, conv, masked):
    tensors = [x.requires_grad_() for x in qkv(b=2, h=2, n=n, s=s, d=3, e=2)]
    kernel = draw(2, 3).requires_grad_() if conv else None
    masks = {"query_mask": random_mask(2, n), "key_mask": random_mask(2, s, 1)} if masked else {}

    def run(query, key, value, kernel=None):
        return nystrom_attention(query, key, value, num_landmarks=m, conv_weight=kernel, **masks)

    assert torch.autograd.gradcheck(run, (*tensors, kernel) if conv else tensors)


@pytest.mark.slow
def test_kmeans_gradients_are_right_while_the_assignment_stays():
    tensors = [x.requires_grad_() for x in qkv(b=1, h=2, n=20, d=3)]
    assert torch.autograd.gradcheck(lambda *x: nystrom_attention(*x, num_landmarks=4, landmarks="kmeans"), tensors)


def test_gradients_of_the_weights_are_right():
    query, key, _ = qkv(b=1, h=1, n=12, d=3)
    query.requires_grad_(), key.requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: nystrom_attention_weights(q, k, [0, 5], num_landmarks=4), (query, key))


@HALF_PRECISION_CASES
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_half_precision_is_within_two_percent_of_float32(dtype, masked, n, m, spread):
    tensors = [x.to(dtype) for x in qkv(n=n, d=32, spread=spread, dtype=torch.float32)]
    mask = random_mask(2, n) if masked else None
    kernel = (0.1 * draw(2, 33)).to(dtype)

    def attend(query, key, value, kernel):
        return nystrom_attention(query, key, value, mask, num_landmarks=m, conv_weight=kernel)

    check_half_precision(attend, [*tensors, kernel], dtype)


def test_autocast_does_not_reach_the_approximation():
    query, key, value = qkv(n=256, d=16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = nystrom_attention(query, key, value, num_landmarks=32)
        half = nystrom_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), num_landmarks=32)
    outside = nystrom_attention(query, key, value, num_landmarks=32)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)
    assert (half.float() - outside).norm() < 0.02 * outside.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_inputs_stay_finite(kind, dtype):
    check_extreme_inputs(partial(nystrom_attention, num_landmarks=16), kind, dtype, n=100)


def test_inputs_in_any_memory_layout_give_the_same():
    query, key, value = qkv(n=48, d=8)
    expected = nystrom_attention(query, key, value, num_landmarks=8, conv_weight=draw(2, 5))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    columns = [x.mT.contiguous().mT for x in (query, key, value)]
    for tensors in (strided, columns):
        torch.testing.assert_close(nystrom_attention(*tensors, num_landmarks=8, conv_weight=draw(2, 5)), expected)


def test_inputs_are_left_as_they_were():
    tensors = qkv(n=48)
    copies = [x.clone() for x in tensors]
    with torch.no_grad():
        nystrom_attention(*tensors, num_landmarks=8, conv_weight=draw(2, 5))
        nystrom_attention(*tensors, num_landmarks=100, conv_weight=draw(2, 5))
    assert all(torch.equal(x, copy) for x, copy in zip(tensors, copies, strict=True))
