"""Blocks chosen for their content: a far token that a block looks for is found, and the number of comparisons bounded.

What they are, to the digit, is part of the formulas in test_nystrom_local.py."""

import pytest
import torch
from drawn import qkv
from torch.nn.functional import normalize, scaled_dot_product_attention

from nystromformer.attention import chosen_blocks, nystrom_local_attention


def looking_far(n=256, d=16, block=16):
    """Each block of queries looks at one other block of keys, half the sequence away."""
    generator = torch.Generator().manual_seed(0)
    of_block = normalize(torch.randn(n // block, d, generator=generator, dtype=torch.float64), dim=1)
    key = 4 * of_block.repeat_interleave(block, 0) + 0.3 * torch.randn(n, d, generator=generator, dtype=torch.float64)
    query = key.roll(n // 2, 0) * 1.5
    value = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return [x[None, None] for x in (query, key, value)]


def error(tensors, **options):
    exact = scaled_dot_product_attention(*tensors)
    out = nystrom_local_attention(*tensors, num_landmarks=16, block_size=16, core_rows=16, **options)
    return ((out - exact).norm() / exact.norm()).item()


def test_a_far_block_that_is_looked_for_is_found():
    tensors = looking_far()
    assert error(tensors, chosen_blocks=1) < 0.1 < 0.3 < error(tensors, chosen_blocks=0)


def test_with_many_blocks_those_that_core_rows_look_at_are_compared(monkeypatch):
    """As many candidates as blocks change nothing; with fewer, results stay finite and of the same shape."""
    tensors = qkv(2, 2, 130, d=4)
    mask = torch.arange(130) < torch.tensor([[130], [90]])
    sizes = {"num_landmarks": 8, "block_size": 4, "core_rows": 8, "chosen_blocks": 3}
    expected = nystrom_local_attention(*tensors, mask, **sizes)
    monkeypatch.setattr(chosen_blocks, "MOST_CANDIDATES", 32)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = nystrom_local_attention(*leaves, mask, **sizes)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(x.isfinite().all() for x in (out, *grads))
    alone = nystrom_local_attention(*(x[1:, :, :90] for x in tensors), **sizes)
    torch.testing.assert_close(out[1:, :, :90], alone)
    torch.testing.assert_close(expected[1:, :, :90], alone)


def test_a_block_that_all_look_at_stays_among_few_candidates(monkeypatch):
    query, key, value = looking_far()
    query = key[:, :, 80:81] * 1.5 + 0.1 * query  # all look at the keys of one block
    all_compared = error((query, key, value), chosen_blocks=1)
    monkeypatch.setattr(chosen_blocks, "MOST_CANDIDATES", 2)
    assert error((query, key, value), chosen_blocks=1) == pytest.approx(all_compared, abs=0.02)
