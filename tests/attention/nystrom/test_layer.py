import pytest
import torch

from nystromformer import NystromAttention, nystrom_attention


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return NystromAttention(24, num_heads=3, num_landmarks=8, conv_kernel_size=5).double()


def heads(x):
    return x.view(*x.shape[:2], 3, 8).transpose(1, 2)


def test_is_projections_around_the_operation(layer):
    x, mask = torch.randn(2, 50, 24, dtype=torch.float64), torch.rand(2, 50) < 0.7
    query, key, value = (heads(linear(x)) for linear in (layer.query, layer.key, layer.value))
    inner = nystrom_attention(query, key, value, mask, num_landmarks=8, conv_weight=layer.conv.weight)
    torch.testing.assert_close(layer(x, mask=mask), layer.output(inner.transpose(1, 2).flatten(2)))


def test_cross_attention_uses_both_masks_and_no_convolution(layer):
    x, context = torch.randn(2, 20, 24, dtype=torch.float64), torch.randn(2, 50, 24, dtype=torch.float64)
    mask, context_mask = torch.rand(2, 20) < 0.9, torch.rand(2, 50) < 0.7
    inner = nystrom_attention(
        *(heads(linear(source)) for linear, source in ((layer.query, x), (layer.key, context), (layer.value, context))),
        num_landmarks=8,
        query_mask=mask,
        key_mask=context_mask,
    )
    out = layer(x, mask=mask, context=context, context_mask=context_mask)
    torch.testing.assert_close(out, layer.output(inner.transpose(1, 2).flatten(2)))


def test_a_padded_batch_equals_one_by_one(layer):
    lengths = [50, 31, 7, 1]
    x = torch.randn(4, 50, 24, dtype=torch.float64)
    mask = torch.arange(50) < torch.tensor(lengths)[:, None]
    out = layer(x, mask=mask)
    for i, length in enumerate(lengths):
        torch.testing.assert_close(out[i, :length], layer(x[i : i + 1, :length])[0], rtol=0, atol=1e-9)


def test_options_shape_the_layer():
    layer = NystromAttention(24, num_heads=2, head_dim=5, conv_kernel_size=None, bias=False, dropout=0.5)
    assert layer.conv is None
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        "query.weight": (10, 24),
        "key.weight": (10, 24),
        "value.weight": (10, 24),
        "output.weight": (24, 10),
    }
    x = torch.randn(1, 9, 24)
    assert (layer(x) == 0).any()
    assert torch.equal(layer.eval()(x), layer(x))


def test_every_parameter_learns(layer):
    layer(torch.randn(2, 50, 24, dtype=torch.float64)).square().sum().backward()
    # A key's bias shifts all logits of a row alike, which the softmax does not see.
    assert all(p.grad.abs().max() > 1e-8 for name, p in layer.named_parameters() if name != "key.bias")


def test_packed_sequences_equal_one_by_one(layer):
    lengths = [50, 31, 7, 1]
    x = torch.randn(sum(lengths), 24, dtype=torch.float64)
    alone = torch.cat([layer(each[None])[0] for each in x.split(lengths)])
    borders = torch.tensor([0, *lengths]).cumsum(0)
    torch.testing.assert_close(layer(x, cu_seqlens=borders), alone, rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="mask was given with cu_seqlens"):
        layer(x, torch.ones(1, 89, dtype=torch.bool), cu_seqlens=borders)
    with pytest.raises(ValueError, match=r"x is \(1, 89, 24\): with cu_seqlens it must be \(tokens, 24\)"):
        layer(x[None], cu_seqlens=borders)
    layer.operation = nystrom_attention
    with pytest.raises(ValueError, match="cu_seqlens was given where sequences are split over processes"):
        layer(x, cu_seqlens=borders)
