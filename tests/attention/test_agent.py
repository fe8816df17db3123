"""Agent attention: its formula on valid tokens, whatever the length. The rest is in the contract of all attentions."""

import pytest
import torch
from drawn import qkv, random_mask

from nystromformer.attention import agent_attention


def dense(query, key, value, number):
    """For one head of valid tokens (n, d)."""
    parts = [query[[i for i in range(len(query)) if i * number // len(query) == j]] for j in range(number)]
    agents = torch.stack([part.mean(0) for part in parts if len(part)])
    scale = query.shape[1] ** -0.5
    return torch.softmax(scale * query @ agents.T, dim=1) @ torch.softmax(scale * agents @ key.T, dim=1) @ value


@pytest.mark.parametrize("n, number", [(1, 4), (3, 8), (40, 7), (41, 41)])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_equals_the_formula_on_each_examples_valid_tokens(n, number, masked):
    tensors = qkv(2, 2, n, d=4, e=3)
    mask = random_mask(2, n, share=0.7) if masked else None
    out = agent_attention(*tensors, mask, num_agents=number)
    for b in range(2):
        real = torch.ones(n, dtype=torch.bool) if mask is None else mask[b]
        for h in range(2):
            if real.any():
                expected = dense(*(x[b, h, real] for x in tensors), number)
                torch.testing.assert_close(out[b, h, real], expected)
        assert (out[b, :, ~real] == 0).all()


def test_no_agents_are_refused():
    with pytest.raises(ValueError, match="num_agents=0"):
        agent_attention(*qkv(n=5), num_agents=0)
