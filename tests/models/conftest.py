"""Small models whose attention matters: weights are large enough that approximation and exact attention differ."""

import pytest
import torch
from encoders import SMALL_NYSTROMFORMER

from nystromformer import NystromformerConfig

SMALL = SMALL_NYSTROMFORMER | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.fixture
def small():
    """Makes a configuration, with changes."""

    def make(**changes):
        fields = SMALL | changes
        if "attention" in changes:
            fields.pop("num_landmarks")
        return NystromformerConfig(**fields)

    return make


@pytest.fixture
def lively():
    """Moves a model's weights far enough from their small start."""

    def move(model, seed=0):
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        return model.eval()

    return move


@pytest.fixture
def ids():
    """Makes token ids of a given batch and length, without special tokens."""

    def make(batch, length, seed=0):
        return torch.randint(5, 100, (batch, length), generator=torch.Generator().manual_seed(seed))

    return make
