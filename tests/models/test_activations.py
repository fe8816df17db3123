"""Activations computed in one kernel against Transformers' own of the same name."""

import pytest
import torch
from transformers.activations import ACT2FN

from nystromformer.models.encoder import ONE_KERNEL, activation


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_value_and_gradient_are_those_of_the_name(name):
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64, requires_grad=True)
    computed, expected = activation(name)(x), ACT2FN[name](x)
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-14)
    gradients = [torch.autograd.grad(out.sum(), x)[0] for out in (computed, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-14)


def test_others_are_taken_as_they_are():
    assert type(activation("gelu")) is type(ACT2FN["gelu"])
