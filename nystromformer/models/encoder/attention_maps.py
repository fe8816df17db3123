"""The whole attention matrix, for looking at. Quadratic, so only for short input and on request."""

import torch
from torch import Tensor

from nystromformer.attention import Attention, nystrom_attention_weights
from nystromformer.attention.masks import attendable
from nystromformer.attention.nystrom import NystromSelfAttention

LONGEST = 1024
"""Sequences for which whole attention matrices are given: 12 heads of 1,024² float32 are 50 MB a layer."""


def attention_map(attention: Attention, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """The matrix that `attention` multiplies the values with, (b, h, n, n), for `query` and `key` (b, h, n, d).

    >>> from nystromformer import build_attention
    >>> attention, x = build_attention("nystrom-8", num_heads=2, head_dim=4), torch.randn(1, 2, 20, 4)
    >>> attention_map(attention, x, x, None).shape
    torch.Size([1, 2, 20, 20])
    """
    length = query.shape[2]
    if length > LONGEST:
        raise ValueError(
            f"output_attentions=True with {length} tokens: at most {LONGEST}, since the matrices grow with the square "
            f"of the length; ask for single rows with nystromformer.nystrom_attention_weights(query, key, rows=[0])."
        )
    if isinstance(attention, NystromSelfAttention):
        rows = torch.arange(length, device=query.device)
        return nystrom_attention_weights(query, key, rows, query_mask=mask, key_mask=mask, **vars(attention.options))
    if not attention.exact:
        raise ValueError(
            f"output_attentions=True: {type(attention).__name__} has no attention matrix to show; "
            f"use attention='standard' or 'nystrom', or leave output_attentions out."
        )
    scores = query @ key.mT * query.shape[3] ** -0.5
    if mask is None:
        return scores.softmax(dim=-1)
    weights = scores.masked_fill(~attendable(mask), -torch.inf).softmax(dim=-1)
    return weights.masked_fill(~(mask[:, None, :, None] & mask[:, None, None, :]), 0)  # masked rows are 0, as outputs
