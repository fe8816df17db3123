"""Linear attention against a dense evaluation of its formula."""

import torch
from drawn import check_same_with_gradients
from torch.nn import functional

from nystromformer.attention.linear import elu_plus_one, linear_attention


def tokens(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in "qkv"]


def dense(query, key, value, mask):
    """The n×n matrix of phi(q) . phi(k), its rows normalized over the valid keys."""
    similarity = (functional.elu(query) + 1) @ (functional.elu(key) + 1).mT
    similarity = similarity * mask[:, None, None, :] * mask[:, None, :, None]
    total = similarity.sum(-1, keepdim=True)
    return torch.where(total > 0, similarity / total.clamp(min=1e-300), 0) @ value


def test_equals_the_normalized_dense_formula_in_output_and_gradients():
    qkv = tokens(2, 3, 41, 5)
    mask = torch.rand(2, 41, generator=torch.Generator().manual_seed(1)) < 0.7
    ours, expected = linear_attention(*qkv, mask), dense(*qkv, mask)
    check_same_with_gradients(ours, expected, qkv, atol=1e-12)


def test_is_an_average_so_constant_values_come_out_unchanged():
    query, key, _ = tokens(2, 3, 41, 5)
    value = torch.full_like(query, 2.5)
    torch.testing.assert_close(linear_attention(query, key, value), value)


def test_feature_map_keeps_its_precision_far_below_zero():
    x = torch.tensor([-30.0, -5.0, -0.1, 0.0, 0.1, 5.0])
    expected = torch.where(x > 0, x.double() + 1, x.double().exp()).float()
    torch.testing.assert_close(elu_plus_one(x), expected, rtol=1e-6, atol=0)


def test_queries_whose_features_nearly_vanish_still_average():
    query, key, value = (x.detach().float() for x in tokens(1, 1, 10, 4))
    out = linear_attention(query.fill_(-20.0), key, value)
    weights = elu_plus_one(key).sum(-1, keepdim=True)
    torch.testing.assert_close(out[0, 0, 0], (weights * value / weights.sum()).sum((0, 1, 2)), rtol=1e-5, atol=1e-6)
