"""Linformer: keys and values projected along the sequence from n to k rows (Wang et al., 2020)."""

from typing import Any

import torch
from torch import Tensor, nn

from nystromformer.attention.base import Attention
from nystromformer.attention.shared.common import (
    check_floating,
    check_self_attention,
    refuse_forward_mode,
    shape_of,
    softmax_attention,
    zero_masked,
)
from nystromformer.checks import check_at_least


def project_sequence(x: Tensor, projection: Tensor) -> Tensor:
    """Eᵀ X over the sequence: `x` (b, h, n, d), `projection` (max_length, k) or one for each head (h, max_length, k).

    An input shorter than max_length uses the first n rows.

    >>> project_sequence(torch.randn(2, 4, 100, 8), torch.randn(512, 16)).shape
    torch.Size([2, 4, 16, 8])
    """
    projection = projection[..., : x.shape[2], :].to(x.dtype)  # (n k) or (h n k)
    # einsum folds the batch into one matrix product; matmul would copy the projection for each example
    projected = torch.einsum("bhnd,nk->bhkd" if projection.dim() == 2 else "bhnd,hnk->bhkd", x, projection)
    return projected.contiguous()  # so that scaled_dot_product_attention takes its fused path, which keeps no (n, k)


def check_projection(name: str, projection: Tensor, tokens: Tensor) -> None:
    """`projection` must be (max_length, k) or (h, max_length, k) for `tokens` (b, h, n, d), with max_length >= n."""
    check_floating(name, projection)
    heads, length = tokens.shape[1:3]
    if projection.dim() not in (2, 3) or (projection.dim() == 3 and projection.shape[0] != heads):
        raise ValueError(
            f"{name} has shape {shape_of(projection)}: must be (max_length, k), or ({heads}, max_length, k) with one "
            f"for each head."
        )
    if projection.shape[-2] < length:
        raise ValueError(
            f"{name} has {projection.shape[-2]} rows for {length} tokens: must have at least as many; shorten the "
            f"input or make a longer projection."
        )


def linformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    key_projection: Tensor,
    value_projection: Tensor | None = None,
) -> Tensor:
    """softmax(Q (EᵀK)ᵀ / √d) FᵀV for self-attention on (b, h, n, d), `mask` (b, n) True for real tokens.

    `key_projection` is E, (max_length, k) or one for each head (h, max_length, k), with max_length >= n.
    `value_projection` is F; None shares E between keys and values. Masked tokens are zeroed before the projection, so
    they add nothing to the k projected rows and no mask is needed after it.

    >>> x = torch.randn(2, 4, 100, 8)
    >>> linformer_attention(x, x, x, key_projection=torch.randn(512, 16)).shape
    torch.Size([2, 4, 100, 8])
    """
    check_self_attention(query, key, value, mask)
    check_projection("key_projection", key_projection, query)
    if value_projection is not None:
        check_projection("value_projection", value_projection, query)
    refuse_forward_mode(query, key, value, key_projection, value_projection)
    query, key, value = (zero_masked(x, mask) for x in (query, key, value))
    key = project_sequence(key, key_projection)  # (b h k d)
    value = project_sequence(value, key_projection if value_projection is None else value_projection)  # (b h k d)
    return zero_masked(softmax_attention(query, key, value, None, query.shape[3] ** -0.5), mask)


class LinformerAttention(Attention):
    """`share_heads`: one projection for all heads (the paper's headwise sharing, its released default) or one each.
    `share_key_value`: one projection for keys and values.
    """

    name = "linformer"
    operation = staticmethod(linformer_attention)
    needs_fixed_length = True
    size_option = "projection_dim"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_length: int | None = None,
        *,
        projection_dim: int = 256,
        share_heads: bool = True,
        share_key_value: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, max_length)
        check_at_least("projection_dim", projection_dim, 1, "the paper uses 256")
        self.projection_dim, self.share_heads, self.share_key_value = projection_dim, share_heads, share_key_value
        assert max_length is not None  # an attention with `needs_fixed_length` has one
        self.bound = (3 / (max_length + projection_dim)) ** 0.5
        shape = (max_length, projection_dim) if share_heads else (num_heads, max_length, projection_dim)
        self.key_projection = nn.Parameter(torch.empty(shape))
        self.value_projection = None if share_key_value else nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # variance 1 / (max_length + k), as the authors released it: projected keys keep the scale of keys
        for projection in self.parameters():
            nn.init.uniform_(projection, -self.bound, self.bound)

    def arguments(self, query: Tensor) -> dict[str, Any]:
        return {"key_projection": self.key_projection, "value_projection": self.value_projection}

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, projection_dim={self.projection_dim}, share_heads={self.share_heads}, "
            f"share_key_value={self.share_key_value}"
        )
