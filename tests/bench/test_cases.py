"""What is measured is what its name says, and only what can be measured is accepted."""

import pytest
import torch

from nystromformer.attention import ATTENTIONS
from nystromformer.bench import cases
from nystromformer.bench.cases import Case, check_device, make_inputs, parse_lengths, prepare

SMALL = {"heads": 2, "head_dim": 16}
EVERYTHING = [*ATTENTIONS, "dense", "nystrom-attention", "transformers"]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("attention", EVERYTHING)
def test_every_attention_and_peer_computes_what_is_asked_for(attention, backward, monkeypatch):
    """What is timed is an output for each token that depends on the input, and its gradients only where asked."""
    forward, gradient, outs, gradients = cases._forward, torch.autograd.grad, [], []

    def watched_forward(case, inputs):
        call, parameters = forward(case, inputs)
        return lambda: outs.append(call()) or outs[-1], parameters

    def watched_gradient(*arguments, **options):
        gradients.extend(gradient(*arguments, **options))

    monkeypatch.setattr(cases, "_forward", watched_forward)
    monkeypatch.setattr(torch.autograd, "grad", watched_gradient)
    for seed in (0, 1):
        prepare(Case(attention=attention, length=128, backward=backward, seed=seed, **SMALL))()
    first, second = outs
    assert first.shape == (1, 128, 2 * 16)
    assert first.isfinite().all()
    assert (first - second).norm() > 0.1 * first.norm()
    assert first.requires_grad == backward
    if backward:
        value = gradients[2]
        assert value.shape == first.shape
        assert value.isfinite().all()
        assert value.any(dim=-1).all(), "each token's value reaches the output"
    else:
        assert not gradients


def test_peers_compute_on_the_given_tensors():
    """The stand-ins for projections reach the peer: its result is our operation's, with its scaling."""
    from nystromformer import nystrom_attention
    from nystromformer.bench.cases import _forward

    case = Case(attention="transformers", length=128, **SMALL)
    inputs = make_inputs(case)
    forward, (kernel,) = _forward(case, inputs)
    split = lambda x: x.view(1, 128, 2, 16).transpose(1, 2)
    query, key, value = split(inputs.query), split(inputs.key), split(inputs.value)
    ours = nystrom_attention(query, key, value, conv_weight=kernel, pinv_scaling="batch")
    torch.testing.assert_close(forward(), ours.transpose(1, 2).flatten(2), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("text", ["0", "a", "", "512,-1", "1.5", "2097152", "9" * 5000])
def test_lengths_must_be_whole_and_positive(text):
    with pytest.raises(ValueError, match="--lengths"):
        parse_lengths(text)


@pytest.mark.parametrize("device", ["meta", "toaster", "cuda:99", ""])
def test_devices_that_compute_nothing_or_are_not_here_are_refused(device):
    with pytest.raises(ValueError, match="must be one of cpu"):
        check_device(device)
    with pytest.raises(ValueError, match="must be one of cpu"):
        Case(attention="standard", length=64, device=device)


@pytest.mark.parametrize("backward, tensors", [(False, 3), (True, 4)])
def test_the_size_of_the_inputs_is_known_before_they_are_made(backward, tensors):
    case = Case(attention="standard", length=100, dtype="bfloat16", backward=backward, **SMALL)
    inputs = make_inputs(case)
    made = [x for x in (inputs.query, inputs.key, inputs.value, inputs.upstream) if x is not None]
    assert len(made) == tensors
    assert case.input_bytes == sum(x.nbytes for x in made)
