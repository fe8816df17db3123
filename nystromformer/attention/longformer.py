"""Longformer: each token attends to a window around it, a few global ones to everything (Beltagy et al., 2020)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from nystromformer.attention.base import Attention, Length
from nystromformer.attention.shared.common import (
    check_self_attention,
    checked_scale,
    key_padding_mask,
    refuse_forward_mode,
    zero_masked,
)
from nystromformer.checks import check_at_least, check_odd

SMALLEST_BLOCK = 64
"""Queries that share one call: fewer would cost more in calls than they save in work."""
PADDING_LOGIT = -3e4
"""Added to the logit of a masked key: finite, so that a masked query among masked keys has a softmax too, and within
float16, which autocast may choose. No weight beside a real token, which always sees itself."""


class Windows(Function):
    """Overlapping slices of `x` along the sequence, as views.

    Slicing one at a time would allocate, in the backward of each slice, a gradient for the whole of `x`: O(n²) work.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bounds: list[tuple[int, int]]) -> tuple[Tensor, ...]:
        return tuple(x[:, :, start:stop] for start, stop in bounds)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.shape, ctx.bounds = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].new_zeros(ctx.shape)
        for (start, stop), gradient in zip(ctx.bounds, gradients, strict=True):
            total[:, :, start:stop] += gradient
        return total, None


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, radius: int, first: int, scale: float
) -> Tensor:
    """Attention of the tokens from `first` on to those at most `radius` away and to the global ones before `first`.

    One softmax goes over both. The queries go in blocks, each with the one window of keys that covers it, so that no
    scores beyond (block, block + 2 radius) are made at a time, and the fused kernel keeps none of them.
    """
    length, device = query.shape[2], query.device
    block = max(SMALLEST_BLOCK, radius // 2)
    queries = [(start, min(start + block, length)) for start in range(first, length, block)]
    keys = [(max(start - radius, first), min(stop + radius, length)) for start, stop in queries]
    # for a block that starts at 0 and keys from -radius on; every block uses a part of it
    query_place, key_place = (torch.arange(size, device=device) for size in (block, block + 2 * radius))
    near = (query_place.unsqueeze(1) + radius - key_place).abs() <= radius
    band = torch.where(near, 0.0, -torch.inf).to(query.dtype)  # (block, block + 2 radius)
    if mask is not None:
        penalty = torch.where(mask, 0.0, PADDING_LOGIT).to(query.dtype)[:, None, None]  # (b 1 1 n)
    global_key, global_value = key[:, :, :first], value[:, :, :first]  # (b h g d)
    outs = []
    blocks = query[:, :, first:].split(block, dim=2)
    windows = (Windows.apply(key, keys), Windows.apply(value, keys))
    for (start, stop), (left, right), q, k, v in zip(queries, keys, blocks, *windows, strict=True):
        offset = left - (start - radius)
        bias = band[: stop - start, offset : offset + right - left]  # (q k)
        if mask is not None:
            bias = bias + penalty[..., left:right]  # (b 1 q k)
        if first:
            k, v = torch.cat((global_key, k), dim=2), torch.cat((global_value, v), dim=2)  # (b h g+k d)
            bias = functional.pad(bias, (first, 0))
            if mask is not None:
                bias[..., :first] = penalty[..., :first]
        outs.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale))
    return torch.cat(outs, dim=2)


def longformer_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
    window: int = 257,
    global_tokens: int = 0,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention on (b, h, n, d) within a window, `mask` (b, n) True for real tokens, in O(n · window).

    The first `global_tokens` tokens attend to all and all attend to them. They use the same queries, keys and values
    as the others; the published model has a second set of projections for them. `scale` is d ** -0.5 by default.

    >>> x = torch.randn(2, 4, 1000, 8)
    >>> longformer_attention(x, x, x, window=65, global_tokens=1).shape
    torch.Size([2, 4, 1000, 8])
    """
    check_self_attention(query, key, value, mask)
    check_odd("window", window)
    check_at_least("global_tokens", global_tokens, 0)
    scale = checked_scale(scale, query)
    refuse_forward_mode(query, key, value)
    query, key, value = (zero_masked(x, mask) for x in (query, key, value))
    length = query.shape[2]
    first = min(global_tokens, length)
    outs = []
    if first:
        outs.append(
            functional.scaled_dot_product_attention(
                query[:, :, :first], key, value, attn_mask=key_padding_mask(mask), scale=scale
            )
        )
    if first < length:
        outs.append(window_attention(query, key, value, mask, min(window // 2, length), first, scale))
    return zero_masked(torch.cat(outs, dim=2), mask)


class LongformerAttention(Attention):
    """`window`: the number of tokens that a token sees, itself in the middle. `global_tokens`: how many leading tokens,
    such as [CLS], see all and are seen by all.
    """

    name = "longformer"
    operation = staticmethod(longformer_attention)
    size_option = "window"

    def __init__(
        self, num_heads: int, head_dim: int, max_length: Length = None, *, window: int = 257, global_tokens: int = 0
    ) -> None:
        super().__init__(num_heads, head_dim, max_length)
        check_odd("window", window)
        check_at_least("global_tokens", global_tokens, 0)
        self.window, self.global_tokens = window, global_tokens

    @property
    def exact_up_to(self) -> float:
        return self.global_tokens + self.window // 2 + 1

    def arguments(self, query: Tensor) -> dict[str, Any]:
        return {"window": self.window, "global_tokens": self.global_tokens}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, window={self.window}, global_tokens={self.global_tokens}"
