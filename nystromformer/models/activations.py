"""Activations under the names that configurations of Transformers use."""

from torch import nn
from transformers.activations import ACT2FN

ONE_KERNEL = {"gelu_new": "gelu_pytorch_tanh"}
"""The same formula, computed and kept for backward as one operation instead of eight."""


def activation(name: str) -> nn.Module:
    """The activation of this name.

    >>> import torch
    >>> activation("gelu_new")(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([-0.1588,  0.0000,  1.9546])
    """
    return ACT2FN[ONE_KERNEL.get(name, name)]
