"""Agent attention: a few agents gather from all keys, and all queries ask the agents (Han et al., ECCV 2024)."""

from typing import Any

from torch import Tensor

from nystromformer.attention.base import Attention
from nystromformer.attention.nystrom.landmarks import means_over, segments
from nystromformer.attention.shared.common import (
    check_self_attention,
    checked_scale,
    full_precision,
    key_padding_mask,
    refuse_forward_mode,
    softmax_attention,
    zero_masked,
)
from nystromformer.checks import check_at_least


def agent_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
    num_agents: int = 64,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(Q Aᵀ) softmax(A Kᵀ) V for self-attention on (b, h, n, d), `mask` (b, n) True for real tokens, in O(n·m).

    The m agents A are means of the queries over segments of valid tokens, so that any length and any mask will do. It
    is the paper's operation for sequences, without its position biases and its convolution of the values, which are
    trained. `scale` of the logits is d ** -0.5 by default. Few tokens give no exact attention: it is another softmax.

    >>> import torch
    >>> x = torch.randn(2, 4, 1000, 8)
    >>> agent_attention(x, x, x, num_agents=49).shape
    torch.Size([2, 4, 1000, 8])
    """
    check_self_attention(query, key, value, mask)
    check_at_least("num_agents", num_agents, 1, "64 is usual")
    scale = checked_scale(scale, query)
    refuse_forward_mode(query, key, value)
    with full_precision(query):
        query, key, value = (zero_masked(x, mask) for x in (query, key, value))
        divided = segments(query, num_agents, mask)
        agents = means_over(query, divided).to(query.dtype)  # (b h m d)
        gathered = softmax_attention(agents, key, value, key_padding_mask(mask), scale)  # (b h m e)
        out = softmax_attention(query, agents, gathered, key_padding_mask(divided.occupied), scale)
        return zero_masked(out, mask)


class AgentAttention(Attention):
    name = "agent"
    operation = staticmethod(agent_attention)
    size_option = "num_agents"

    def __init__(self, num_heads: int, head_dim: int, max_length: int | None = None, *, num_agents: int = 64) -> None:
        super().__init__(num_heads, head_dim, max_length)
        check_at_least("num_agents", num_agents, 1, "64 is usual")
        self.num_agents = num_agents

    def arguments(self, query: Tensor) -> dict[str, Any]:
        return {"num_agents": self.num_agents}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_agents={self.num_agents}"
