"""Performer against `performer-pytorch` with the same projection, and against the softmax that it estimates."""

import pytest
import torch
from performer_pytorch import FastAttention
from torch.nn import functional

from nystromformer.attention.performer import PerformerAttention, draw_projection, performer_attention, summarize_keys

HEADS, DIM = 3, 8


def random(*shape, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(spread).requires_grad_()


def qkv(batch=2, length=33, spread=1.0):
    return [random(batch, HEADS, length, DIM, seed=seed, spread=spread) for seed in range(3)]


def features(x, projection, epsilon=0.0, c=0.0):
    """phi written out: d^(-1/4) once on each side."""
    x = x * DIM**-0.25
    return torch.exp(x @ projection.mT - x.square().sum(-1, keepdim=True) / 2 - c) + epsilon


def dense(query, key, value, projection, mask):
    """The n×n matrix of phi(q) . phi(k), normalized over the valid keys of each example alone, at the published c."""
    out = torch.zeros_like(query)
    for b in range(len(query)):
        for h in range(HEADS):
            q, k, v = (x[b, h, mask[b]] for x in (query, key, value))
            row_c, key_c = ((x * DIM**-0.25 @ projection.mT).amax(dim) for x, dim in ((q, -1), (k, (0, 1))))
            kernel = features(q, projection, 1e-4, row_c[:, None]) @ features(k, projection, 1e-4, key_c).mT
            out[b, h, mask[b]] = kernel / kernel.sum(-1, keepdim=True) @ v
    return out


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("length, num_features", [(1, 16), (33, 5), (700, 256)])
def test_equals_performer_pytorch_in_output_and_gradients(length, num_features, spread):
    theirs = FastAttention(DIM, nb_features=num_features).double()
    inputs = qkv(length=length, spread=spread)
    expected = theirs(*inputs)
    ours = performer_attention(*inputs, projection=theirs.projection_matrix)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-10)
    weight = random(*ours.shape, seed=9).detach()
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, weight), torch.autograd.grad(expected, inputs, weight), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("length, num_features", [(33, 64), (1100, 1024)])
def test_equals_the_dense_formula_over_the_valid_tokens(length, num_features):
    inputs = [x.detach() for x in qkv(length=length)]
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(5)) < 0.5
    mask[1, : 3 * length // 4] = False  # whole blocks without a key
    torch.manual_seed(0)
    projection = draw_projection(num_features, DIM).double()
    ours = performer_attention(*inputs, mask, projection=projection)
    torch.testing.assert_close(ours, dense(*inputs, projection, mask), rtol=0, atol=1e-10)


def test_padding_does_not_set_the_scale_of_the_keys():
    _, key, value = (x.detach() for x in qkv(1, 6))
    mask = torch.arange(6).eq(0).unsqueeze(0)
    key, value = (x * mask[..., None] for x in (key, value))
    projection = -key[0, 0, :1]  # W k of the first token is negative, so that the 0 of padding would be larger
    padded = summarize_keys(key, value, projection, mask, 1e-4, rows=4)
    alone = summarize_keys(key[:, :, :1], value[:, :, :1], projection, None, 1e-4, rows=4)
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-12)


def test_no_keys_give_an_empty_summary():
    _, key, value = (x.detach() for x in qkv(1, 6))
    mask = torch.zeros(1, 6, dtype=torch.bool)
    context, weight = summarize_keys(key * 0, value * 0, draw_projection(4, DIM).double(), mask, 1e-4, rows=4)
    assert not context.any()
    assert not weight.any()


def test_approaches_exact_attention_as_features_grow():
    # the variance of the features grows with exp(|q| |k|): short vectors show the limit with few of them
    query, key, value = (random(1, HEADS, 64, DIM, seed=i, spread=spread) for i, spread in enumerate((0.5, 0.5, 1.0)))
    exact = functional.scaled_dot_product_attention(query, key, value)
    errors = []
    for num_features in (16, 256, 4096):
        torch.manual_seed(0)
        projections = [draw_projection(num_features, DIM).double() for _ in range(8)]
        outs = torch.stack(
            [performer_attention(query, key, value, projection=projection) for projection in projections]
        )
        errors.append(((outs - exact).norm() / 8**0.5 / exact.norm()).item())
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.05


def test_features_estimate_the_softmax_kernel_without_bias():
    torch.manual_seed(0)
    q, k = (0.7 * torch.randn(6, DIM, dtype=torch.float64) for _ in "qk")
    draws = torch.stack(
        [features(q, w) @ features(k, w).mT / len(w) for w in (draw_projection(64, DIM).double() for _ in range(800))]
    )
    exact = torch.exp(q @ k.mT / DIM**0.5)
    assert ((draws.mean(0) - exact).abs() < 5 * draws.std(0) / 800**0.5).all()


def test_projection_is_orthogonal_in_blocks_with_gaussian_rows():
    torch.manual_seed(0)
    projection = draw_projection(2048 * DIM + 3, DIM)
    blocks = functional.normalize(projection[: 2048 * DIM], dim=1).view(-1, DIM, DIM)
    torch.testing.assert_close(blocks @ blocks.mT, torch.eye(DIM).expand_as(blocks), rtol=0, atol=1e-5)
    assert projection.shape == (2048 * DIM + 3, DIM)
    for place in range(DIM):  # rows of every place in a block: the mean is 0, or features would be biased
        rows = projection[place::DIM]
        assert rows.mean(0).abs().max() < 5 / len(rows) ** 0.5
        assert (rows.square().mean(0) - 1).abs().max() < 5 * (2 / len(rows)) ** 0.5


def test_gradients_pass_gradcheck_with_a_fixed_projection():
    torch.manual_seed(0)
    projection, mask = draw_projection(12, DIM).double(), torch.arange(9).expand(2, -1) != 4
    # without epsilon the constant that keeps exp in range cancels, so holding it fixed is exact
    attend = lambda *x: performer_attention(*x, mask, projection=projection, epsilon=0.0)
    assert torch.autograd.gradcheck(attend, qkv(length=9), fast_mode=True)


def test_large_inputs_stay_finite():
    inputs = [x.detach().float() for x in qkv(spread=100.0)]
    assert performer_attention(*inputs, projection=draw_projection(256, DIM)).isfinite().all()


def test_projection_stays_unless_redraw_is_asked_for_and_only_in_training():
    inputs = [x.detach().float() for x in qkv()]
    kept, redrawn = PerformerAttention(HEADS, DIM), PerformerAttention(HEADS, DIM, redraw=True)
    for attention, mode, changes in ((kept, True, False), (redrawn, True, True), (redrawn, False, False)):
        before = attention.train(mode).projection.clone()
        attention(*inputs)
        assert torch.equal(before, attention.projection) != changes
        assert "projection" in attention.state_dict()


def test_redraw_allows_two_forwards_before_a_backward():
    inputs = [x.detach().float().requires_grad_() for x in qkv()]
    attention = PerformerAttention(HEADS, DIM, redraw=True)
    (attention(*inputs) + attention(*inputs)).sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_bad_num_features_is_refused():
    with pytest.raises(ValueError, match="num_features=0: must be at least 1; the paper uses 256"):
        PerformerAttention(HEADS, DIM, num_features=0)
