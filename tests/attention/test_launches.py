"""What can be shown of a GPU without one: how many kernels are launched, and that none makes the host wait."""

import pytest
import torch

from nystromformer import build_attention
from nystromformer.attention.native import without_native
from nystromformer.bench.measure import Kernels

BOUNDS = {
    ("nystrom-64", False): (50, 110),
    ("nystrom-64", True): (110, 130),
    ("nystrom-local", False): (110, 200),
    ("nystrom-local", True): (180, 215),
}
"""Of the forward and the backward of 12 heads of 64, at most. They may become less."""


def launches(name, masked, device="cpu", n=512):
    attention = build_attention(name, num_heads=12, head_dim=64).to(device)
    leaves = [torch.randn(1, n, 768, device=device, requires_grad=True) for _ in range(3)]
    mask = (torch.arange(n, device=device) < n - 50)[None] if masked else None
    # The code that stands for a GPU's, whatever this CPU has of its own:
    with without_native(), Kernels() as forward:
        out = attention(*(x.unflatten(2, (12, 64)).transpose(1, 2) for x in leaves), mask)
    with without_native(), Kernels() as backward:
        gradients = torch.autograd.grad(out, [*leaves, *attention.parameters()], torch.ones_like(out))
    assert all(grad.device.type == torch.device(device).type for grad in gradients)
    return forward, backward


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("name", ["nystrom-64", "nystrom-local"])
def test_kernels_stay_within_the_bounds_that_were_reached(name, masked):
    forward, backward = launches(name, masked)
    most_forward, most_backward = BOUNDS[name, masked]
    assert forward.count <= most_forward
    assert backward.count <= most_backward
    assert forward.waiting == backward.waiting == []


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("name", ["nystrom-64", "nystrom-local"])
def test_no_step_needs_the_content_of_a_tensor(name, masked):
    """On the device without content all of our code for other devices than CPUs runs: what reads a number fails."""
    forward, backward = launches(name, masked, "meta", n=4096)
    assert forward.waiting == backward.waiting == []


def test_this_test_sees_what_would_wait():
    with Kernels() as kernels:
        torch.ones(3).nonzero()
        torch.ones(1).item()
    assert kernels.waiting == ["aten.nonzero.default", "aten._local_scalar_dense.default"]
