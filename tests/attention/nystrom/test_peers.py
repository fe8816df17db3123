"""Parity with published implementations in the regimes where they are right, and their known faults absent here."""

import pytest
import torch
from nystrom_attention import NystromAttention as PeerLayer
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

from nystromformer import NystromAttention, nystrom_attention


def peer_layer(dim=32, heads=2, m=8, residual=True):
    torch.manual_seed(0)
    peer = PeerLayer(
        dim, dim_head=16, heads=heads, num_landmarks=m, residual=residual, residual_conv_kernel=5, pinv_iterations=6
    ).double()
    return peer.eval()


def same_weights(peer, m=8, **options):
    layer = NystromAttention(32, num_heads=2, num_landmarks=m, conv_kernel_size=5, **options).double()
    query, key, value = peer.to_qkv.weight.chunk(3)
    with torch.no_grad():
        for linear, weight in ((layer.query, query), (layer.key, key), (layer.value, value)):
            linear.weight.copy_(weight)
            linear.bias.zero_()
        layer.output.weight.copy_(peer.to_out[0].weight)
        layer.output.bias.copy_(peer.to_out[0].bias)
        layer.conv.weight.copy_(peer.res_conv.weight)
    return layer


def test_layer_equals_nystrom_attention_for_one_unpadded_example_and_head():
    """One matrix in the batch, so that scaling by the batch's maximum is scaling by its own; n divisible by m."""
    torch.manual_seed(0)
    peer = PeerLayer(16, dim_head=16, heads=1, num_landmarks=8, residual_conv_kernel=5, pinv_iterations=6).double()
    x = torch.randn(1, 64, 16, dtype=torch.float64)
    query, key, value = (y[:, None] for y in peer.to_qkv(x).chunk(3, dim=-1))
    ours = nystrom_attention(query, key, value, num_landmarks=8, conv_weight=peer.res_conv.weight)
    torch.testing.assert_close(peer.to_out(ours[:, 0]), peer(x), rtol=1e-8, atol=1e-9)


def test_operation_equals_nystrom_attention_with_batch_scaling():
    peer, x = peer_layer(), torch.randn(3, 64, 32, dtype=torch.float64)
    split = lambda y: y.view(3, 64, 2, 16).transpose(1, 2)
    query, key, value = (split(y) for y in peer.to_qkv(x).chunk(3, dim=-1))
    ours = nystrom_attention(query, key, value, num_landmarks=8, conv_weight=peer.res_conv.weight, pinv_scaling="batch")
    torch.testing.assert_close(peer.to_out(ours.transpose(1, 2).flatten(2)), peer(x), rtol=1e-8, atol=1e-9)


def test_batch_neighbors_change_the_peer_and_not_us():
    peer = peer_layer()
    layer, x = same_weights(peer), 3 * torch.randn(3, 64, 32, dtype=torch.float64)
    one_by_one = lambda module: torch.cat([module(example[None]) for example in x])
    assert (peer(x) - one_by_one(peer)).abs().max() > 1e-6
    torch.testing.assert_close(layer(x), one_by_one(layer), rtol=0, atol=1e-9)


def test_short_input_is_exact_here_and_not_in_the_peer():
    peer = peer_layer(m=16)
    layer, x = same_weights(peer, m=16), torch.randn(1, 10, 32, dtype=torch.float64)
    split = lambda y: y.view(1, 10, 2, 16).transpose(1, 2)
    query, key, value = (split(y) for y in peer.to_qkv(x).chunk(3, dim=-1))
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value) + peer.res_conv(value)
    exact = peer.to_out(exact.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), exact)
    assert (peer(x) - exact).abs().max() > 1e-3


@pytest.mark.parametrize("n, m", [(64, 8), (128, 16), (96, 32)])
def test_operation_equals_transformers_with_batch_scaling(n, m):
    torch.manual_seed(0)
    config = NystromformerConfig(
        hidden_size=32, num_attention_heads=2, num_landmarks=m, segment_means_seq_len=n, conv_kernel_size=9
    )
    peer = NystromformerSelfAttention(config).double().eval()
    x = torch.randn(2, n, 32, dtype=torch.float64, requires_grad=True)
    split = lambda y: y.view(2, n, 2, 16).transpose(1, 2)
    query, key, value = (split(linear(x)) for linear in (peer.query, peer.key, peer.value))
    ours = nystrom_attention(query, key, value, num_landmarks=m, conv_weight=peer.conv.weight, pinv_scaling="batch")
    theirs = peer(x)[0]
    torch.testing.assert_close(ours.transpose(1, 2).flatten(2), theirs, rtol=1e-6, atol=1e-7)
    ours_grad, theirs_grad = (
        torch.autograd.grad(out.sin().sum(), [x, peer.conv.weight], retain_graph=True)
        for out in (ours.transpose(1, 2).flatten(2), theirs)
    )
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-6, atol=1e-7)
