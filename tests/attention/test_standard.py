"""Standard attention is softmax(Q Kᵀ / √d) V over the valid tokens."""

import pytest
import torch
from drawn import check_same_with_gradients
from largest_tensor import saved_sizes
from torch.nn import functional

from nystromformer.attention import native
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


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_padded_batches_equal_each_example_alone_and_zeros(dropout):
    """With dropout in the mean over many heads that are the same."""
    query, key, value = (x.detach()[:, :1].expand(-1, 4000, -1, -1) for x in tokens(3, 1, 7, 5))
    lengths = torch.tensor([[7], [4], [0]])
    out = standard_attention(query, key, value, torch.arange(7) < lengths, dropout=dropout).mean(1)
    for example, length in zip(range(3), lengths, strict=True):
        assert (out[example, length:] == 0).all()
        if length:
            alone = standard_attention(*(x[example, None, :1, :length] for x in (query, key, value)))[0, 0]
            torch.testing.assert_close(out[example, :length], alone, rtol=0, atol=0.1 if dropout else 1e-12)


@pytest.mark.skipif(native.instructions().startswith("none"), reason=native.instructions())
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_writes_no_matrix_down(dropout):
    query, key, value = (x.detach().float().requires_grad_() for x in tokens(2, 1, 1500, 8))
    mask = torch.arange(1500) < torch.tensor([[1500], [1100]])
    for given in (None, mask):
        with saved_sizes() as sizes:
            out = standard_attention(query, key, value, given, dropout=dropout)
        assert max(sizes) <= query.numel()
        out.sum().backward()
        assert query.grad.isfinite().all()


def test_the_same_seed_drops_the_same_weights():
    qkv = [x.detach().float() for x in tokens(2, 3, 33, 5)]
    torch.manual_seed(3)
    first = standard_attention(*qkv, dropout=0.5)
    torch.manual_seed(3)
    assert torch.equal(standard_attention(*qkv, dropout=0.5), first)


@pytest.mark.parametrize("dropout, error", [(1.0, ValueError), (-0.1, ValueError), ("a", TypeError)])
def test_bad_dropout_is_refused(dropout, error):
    with pytest.raises(error, match="dropout="):
        StandardAttention(2, 4, dropout=dropout)
