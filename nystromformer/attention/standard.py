"""Standard softmax attention: exact, quadratic in time."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nystromformer.attention.base import Attention
from nystromformer.attention.native import LEVELS, dropped_levels, exact_attention, runs_native, wants_gradient
from nystromformer.attention.shared.common import (
    check_query_key_value,
    check_self_attention,
    checked_masks,
    checked_rows,
    checked_scale,
    full_precision,
    is_readable,
    key_padding_mask,
    refuse_forward_mode,
    zero_masked,
)
from nystromformer.attention.shared.varlen import valid_spans
from nystromformer.checks import check_fraction


def standard_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(Q Kᵀ · scale) V: (b, h, n, e) from (b, h, n, d), (b, h, s, d), (b, h, s, e).

    `mask` (b, n) is True for the real tokens of self-attention; `query_mask` (b, n) and `key_mask` (b, s) are those of
    cross-attention. `dropout` is the probability with which a weight is dropped. `scale` is d ** -0.5 by default.

    >>> x = torch.randn(2, 4, 10, 8)
    >>> standard_attention(x, x, x).shape
    torch.Size([2, 4, 10, 8])
    """
    check_query_key_value(query, key, value)
    query_mask, key_mask = checked_masks(query, key, mask, query_mask, key_mask)
    check_fraction("dropout", dropout)
    scale = checked_scale(scale, query)
    refuse_forward_mode(query, key, value)
    if _computed_here(query, key, value, dropout):
        spans = None
        if query_mask is not None and query_mask is key_mask and is_readable(query_mask):
            spans = valid_spans(query_mask)
        unmasked = query_mask is None and key_mask is None
        if spans is not None or (unmasked and (dropout or wants_gradient(query, key, value))):
            return exact_attention(query, key, value, scale, dropout, spans)
    query, key, value = zero_masked(query, query_mask), zero_masked(key, key_mask), zero_masked(value, key_mask)
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=key_padding_mask(key_mask), dropout_p=dropout, scale=scale
    )
    return zero_masked(out, query_mask)


def _computed_here(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether machine code of our own can compute it: on CPUs it drops weights without a matrix of them, leaves padding
    out, and trains faster than PyTorch's. A forward alone of all tokens is PyTorch's, what everything is compared with.
    """
    droppable = dropout == 0 or 0 < dropped_levels(dropout) < LEVELS
    eager = not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
    return droppable and eager and runs_native(query, key, value)


class StandardAttention(Attention):
    """`dropout`: of the attention weights, in training."""

    name = "standard"
    operation = staticmethod(standard_attention)
    linear = False
    cross_attention = True

    def __init__(self, num_heads: int, head_dim: int, max_length: int | None = None, *, dropout: float = 0.0) -> None:
        super().__init__(num_heads, head_dim, max_length)
        check_fraction("dropout", dropout)
        self.dropout = dropout

    @property
    def exact_up_to(self) -> float:
        return math.inf

    def arguments(self, query: Tensor) -> dict[str, Any]:
        return {"dropout": self.dropout if self.training else 0.0}

    def weights(self, query: Tensor, key: Tensor, rows: Sequence[int] | Tensor, mask: Tensor | None = None) -> Tensor:
        """Rows of the softmax matrix, (b, h, len(rows), n), with gradients and without dropout."""
        check_self_attention(query, key, None, mask)
        rows = checked_rows(rows, query)
        with full_precision(query):
            asked, key = zero_masked(query, mask)[:, :, rows], zero_masked(key, mask)
            scores = asked @ key.mT * query.shape[3] ** -0.5  # (b h r n)
            attendable = key_padding_mask(mask)
            if mask is None or attendable is None:
                return scores.softmax(dim=-1)
            weights = scores.masked_fill(~attendable, -torch.inf).softmax(dim=-1)
            # rows of masked queries are 0, as outputs are
            return weights.masked_fill(~(mask[:, None, rows, None] & mask[:, None, None, :]), 0)
