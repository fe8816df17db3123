"""The names of the nystrom-attention package: its weights load, its results are met where it is right."""

import inspect

import pytest
import torch
from nystrom_attention import NystromAttention as PeerAttention
from nystrom_attention import Nystromformer as PeerModel

from nystromformer.integrations.nystrom_attention import NystromAttention, Nystromformer

SIZES = {"dim": 32, "dim_head": 8, "heads": 4, "num_landmarks": 8}


def pair(ours=NystromAttention, peers=PeerAttention, ours_only=(), **changes):
    """The package's module in float64 and ours with its weights."""
    torch.manual_seed(0)
    peer = peers(**SIZES | changes).double().eval()
    for p in peer.parameters():
        p.data.mul_(3)  # so that attention is peaked
    mine = ours(**SIZES | changes | dict(ours_only)).double().eval()
    mine.load_state_dict(peer.state_dict())
    return mine, peer


def inputs(batch, length):
    return torch.randn(batch, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ours, peers", [(NystromAttention, PeerAttention), (Nystromformer, PeerModel)])
def test_arguments_and_their_defaults_are_the_packages(ours, peers):
    mine, theirs = (inspect.signature(module.__init__).parameters for module in (ours, peers))
    assert [name for name in mine if name != "pinv_scaling"] == list(theirs)
    assert all(mine[name].default == theirs[name].default for name in theirs)


@pytest.mark.parametrize("changes", [{}, {"residual": False}, {"residual_conv_kernel": 5}, {"pinv_iterations": 4}])
def test_attention_with_its_weights_gives_its_output(changes):
    mine, peer = pair(ours_only={"pinv_scaling": "batch"}, **changes)
    torch.testing.assert_close(mine(inputs(3, 64)), peer(inputs(3, 64)))


def test_one_matrix_needs_no_batch_scaling():
    mine, peer = pair(heads=1)
    torch.testing.assert_close(mine(inputs(1, 64)), peer(inputs(1, 64)))


def test_the_whole_model_with_its_weights_gives_its_output():
    mine, peer = pair(Nystromformer, PeerModel, {"pinv_scaling": "batch"}, depth=2, attn_values_residual_conv_kernel=5)
    assert mine.state_dict().keys() == peer.state_dict().keys()
    torch.testing.assert_close(mine(inputs(3, 64)), peer(inputs(3, 64)))


def test_attention_maps_are_the_packages():
    mine, peer = pair(ours_only={"pinv_scaling": "batch"})
    x = inputs(2, 64)
    _, matrix = peer(x, return_attn=True)
    torch.testing.assert_close(mine(x, return_attn=True)[1], matrix)
    torch.testing.assert_close(mine(x, return_attn=[0, 5])[1], matrix[:, :, [0, 5]])
    for factor, theirs in zip(
        mine(x, return_attn_matrices=True)[1], peer(x, return_attn_matrices=True)[1], strict=True
    ):
        torch.testing.assert_close(factor, theirs)


@pytest.mark.parametrize("length", [3, 8, 50])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_the_factors_multiply_to_the_map(length, masked):
    mine, _ = pair()
    x = inputs(2, length)
    mask = torch.arange(length) < torch.tensor([[length], [max(length // 8, 2)]]) if masked else None
    F, Z, B = mine(x, mask, return_attn_matrices=True)[1]
    matrix = mine(x, mask, return_attn=True)[1]
    torch.testing.assert_close(F @ Z @ B, matrix)
    if masked:
        assert matrix[1, :, :, mask[1].sum() :].abs().max() == 0


def test_its_faults_are_gone():
    mine, peer = pair()
    x = inputs(3, 61)  # not divisible by 8
    alone = lambda module: torch.cat([module(example[None]) for example in x])
    assert (peer(x) - alone(peer)).abs().max() > 1e-4
    torch.testing.assert_close(mine(x), alone(mine), rtol=0, atol=1e-9)

    mask = torch.arange(61) < torch.tensor([[61], [40], [7]])
    together = mine(x, mask)
    for example, real in enumerate(mask.sum(1)):
        torch.testing.assert_close(
            together[example, :real], mine(x[example : example + 1, :real])[0], rtol=0, atol=1e-9
        )


def test_rows_of_long_input_need_no_matrix():
    torch.manual_seed(0)
    attention = NystromAttention(**SIZES)
    x = torch.randn(1, 20_000, 32)
    with torch.no_grad():
        assert attention(x, return_attn=[0])[1].shape == (1, 4, 1, 20_000)
        with pytest.raises(ValueError, match=r"return_attn=True with 20000 tokens.*return_attn=\[0\]"):
            attention(x, return_attn=True)


def test_gradients_reach_every_weight():
    model = Nystromformer(dim=32, depth=1, dim_head=8, heads=4, num_landmarks=8)
    model(torch.randn(2, 50, 32)).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"heads": 0}, "heads=0: must be at least 1"),
        ({"num_landmarks": 0}, "num_landmarks=0: must be at least 1"),
        ({"residual_conv_kernel": 4}, "residual_conv_kernel=4: must be odd"),
        ({"pinv_scaling": "row"}, "pinv_scaling='row': must be one of 'matrix', 'batch'"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        NystromAttention(**SIZES | changes)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"x has shape \(2, 9, 31\): must be \(batch, length, 32\)"):
        NystromAttention(**SIZES)(torch.randn(2, 9, 31))
