"""Standard attention is softmax(Q Kᵀ / √d) V over the valid tokens."""

import pytest
import torch
from drawn import check_same_with_gradients
from torch.nn import functional

from nystromformer.attention.standard import StandardAttention, standard_attention


def tokens(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True) for _ in "qkv"]


def test_equals_scaled_dot_product_attention_in_output_and_gradients():
    qkv = tokens(2, 3, 33, 5)
    ours, theirs = standard_attention(*qkv), functional.scaled_dot_product_attention(*qkv)
    check_same_with_gradients(ours, theirs, qkv, atol=1e-12)


def test_with_a_mask_equals_attention_among_the_valid_tokens_alone():
    query, key, value = tokens(1, 3, 33, 5)
    mask = torch.arange(33).remainder(3).ne(1).unsqueeze(0)
    valid = [x[:, :, mask[0]] for x in (query, key, value)]
    scores = valid[0] @ valid[1].mT / 5**0.5
    out = standard_attention(query, key, value, mask)
    torch.testing.assert_close(out[:, :, mask[0]], scores.softmax(-1) @ valid[2], rtol=0, atol=1e-12)


def test_dropout_acts_in_training_only():
    qkv = [x.detach() for x in tokens(1, 2, 9, 4)]
    attention = StandardAttention(2, 4, dropout=0.5)
    assert not torch.equal(attention(*qkv), attention(*qkv))
    attention.eval()
    torch.testing.assert_close(attention(*qkv), standard_attention(*qkv))


@pytest.mark.parametrize("dropout, error", [(1.0, ValueError), (-0.1, ValueError), ("a", TypeError)])
def test_bad_dropout_is_refused(dropout, error):
    with pytest.raises(error, match="dropout="):
        StandardAttention(2, 4, dropout=dropout)
