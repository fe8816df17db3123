"""Nyström attention: softmax attention in linear time and memory, through m landmarks.

With landmarks Q̃, K̃ of the queries and keys (paper, eq. 13 to 15):

    F = softmax(Q K̃ᵀ/√d)   A = softmax(Q̃ K̃ᵀ/√d)   B = softmax(Q̃ Kᵀ/√d)   out = F A⁺ B V + conv(V)

B V is ordinary attention with m queries, and F W with W = A⁺ (B V) is ordinary attention with m keys. So the whole is
two calls of `scaled_dot_product_attention` around a small pseudoinverse, and no n×m matrix ever exists.
"""

import torch
from torch import Tensor
from torch.nn import functional

from nystromformer.attention.base import Attention
from nystromformer.attention.checks import check_mask, check_odd, check_query_key_value
from nystromformer.attention.landmarks import means_over
from nystromformer.attention.masks import attendable, zero_padding
from nystromformer.attention.nystrom_core import NystromOptions, checked_scale, landmark_core
from nystromformer.attention.pseudoinverse import full_precision
from nystromformer.attention.skip_convolution import SkipConvolution, kernel_of, skip_convolution


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_landmarks: int = 64,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    conv_weight: Tensor | None = None,
    pinv_iterations: int = 6,
    pinv_scaling: str = "matrix",
    scale: float | None = None,
    landmarks: str = "segment_means",
    pinv: str = "iterative",
    is_causal: bool = False,
) -> Tensor:
    """Softmax attention approximated in O(n·m): (b, h, n, e), in the dtype of `value`.

    Args:
        query, key, value: (b, h, n, d), (b, h, s, d), (b, h, s, e); n ≠ s is cross-attention.
        num_landmarks: m. The result is exact for an example with at most m valid keys or at most m valid queries.
        query_mask, key_mask: boolean (b, n) and (b, s), True for real tokens, anywhere. For self-attention pass the
            same mask twice. Masked rows of the result are 0; what stands at masked positions, and how many there
            are, changes nothing.
        conv_weight: the skip convolution's kernel for each head, (h, k) or (h, 1, k, 1), k odd; needs n = s.
        pinv_iterations: steps of the pseudoinverse; more are not safer (`iterative_pinv`).
        pinv_scaling: "matrix", or "batch" as published checkpoints were trained: outputs then depend on the batch.
        scale: of the logits, d ** -0.5 by default.
        landmarks: "segment_means" or "kmeans" (slower; the paper mentions it).
        pinv: "iterative" or "exact" (slow; for studies).
        is_causal: refused when true. Landmarks average over later tokens, so this attention can't be causal.

    >>> query = key = value = torch.randn(2, 8, 1000, 64)
    >>> nystrom_attention(query, key, value, num_landmarks=32).shape
    torch.Size([2, 8, 1000, 64])
    """
    check_query_key_value(query, key, value)
    check_mask("query_mask", query_mask, query)
    check_mask("key_mask", key_mask, key)
    options = NystromOptions(
        num_landmarks=num_landmarks,
        pinv_iterations=pinv_iterations,
        pinv_scaling=pinv_scaling,
        landmarks=landmarks,
        pinv=pinv,
    )
    scale = checked_scale(scale, query)
    if is_causal:
        raise ValueError(
            "is_causal=True: must be False, because landmarks average over later tokens; for causal attention use "
            "torch.nn.functional.scaled_dot_product_attention(..., is_causal=True)."
        )
    if conv_weight is not None:
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"conv_weight was given with {query.shape[2]} queries and {key.shape[2]} keys: the skip convolution "
                f"needs as many; leave conv_weight out for cross-attention."
            )
        conv_weight = kernel_of(conv_weight, value.shape[1], value.dtype)

    with full_precision(query):
        query, key, value = zero_padding(query, query_mask), zero_padding(key, key_mask), zero_padding(value, key_mask)
        out = _attend(query, key, value, query_mask, key_mask, scale, options)
        if conv_weight is not None:
            skip = skip_convolution(value, conv_weight)
            # Attention needs its own output for backward; without backward the sum needs no memory of its own.
            out = out + skip if out.requires_grad else out.add_(skip)
        return zero_padding(out, query_mask)


class NystromSelfAttention(Attention):
    """`nystrom_attention` with its skip convolution, as `build_attention("nystrom-64", ...)` makes it."""

    size_option = "num_landmarks"
    operation = staticmethod(nystrom_attention)
    """What attends. An instance can be given another function of this signature: `nystromformer.distributed` does."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_length: int | None = None,
        *,
        num_landmarks: int = 64,
        conv_kernel_size: int | None = 33,
        pinv_iterations: int = 6,
        pinv_scaling: str = "matrix",
        landmarks: str = "segment_means",
        pinv: str = "iterative",
    ) -> None:
        super().__init__(num_heads, head_dim, max_length)
        self.options = NystromOptions(
            num_landmarks=num_landmarks,
            pinv_iterations=pinv_iterations,
            pinv_scaling=pinv_scaling,
            landmarks=landmarks,
            pinv=pinv,
        )
        if conv_kernel_size is not None:
            check_odd("conv_kernel_size", conv_kernel_size)
        self.conv = None if conv_kernel_size is None else SkipConvolution(num_heads, conv_kernel_size)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return self.operation(
            query,
            key,
            value,
            query_mask=mask,
            key_mask=mask,
            conv_weight=None if self.conv is None else self.conv.weight,
            **vars(self.options),
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.options}"


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    options: NystromOptions,
) -> Tensor:
    """F A⁺ B V, exact for each example with at most m valid keys or queries. Masked rows must be zero already."""
    exporting = torch.compiler.is_exporting()  # one graph for all lengths: no decision may rest on a length
    m = options.num_landmarks
    if not exporting and (query.shape[2] <= m or key.shape[2] <= m):
        return softmax_attention(query, key, value, attendable(key_mask), scale)

    core = landmark_core(query, key, query_mask, key_mask, scale, options)
    BV = softmax_attention(core.queries.to(value.dtype), key, value, attendable(key_mask), scale)  # (b h m e)
    W = (core.inverse @ BV.to(core.inverse.dtype)).to(value.dtype)  # (b h m e)
    if exporting or key_mask is not None:
        # With one key a segment K̃ = K, so that F is the exact softmax matrix and belongs to the values themselves.
        own_values = means_over(value, core.key_segments).to(value.dtype)
        W = torch.where(core.key_segments.one_token_each[:, None, None, None], own_values, W)
    out = softmax_attention(query, core.keys.to(value.dtype), W, core.attendable_keys, scale)
    if exporting or (query_mask is not None and query_mask is not key_mask):
        # With one query a segment Q̃ = Q, so that B V already holds the exact row of each query.
        index = core.query_segments.index[:, None, :, None].expand(-1, *BV.shape[1:2], -1, BV.shape[3])
        own_rows = BV.gather(2, index)
        out = torch.where(core.query_segments.one_token_each[:, None, None, None], own_rows, out)
    return out


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """`scaled_dot_product_attention` on its fused kernels: they need equal widths, the fallback an n×m matrix."""
    width, differ = value.shape[3], query.shape[3] != value.shape[3]
    query, key, value = equal_widths(query, key, value)
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale)
    return out[..., :width] if differ else out


def equal_widths(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three as fused kernels take them: zeros fill the narrower ones up, and no head is scattered in memory."""
    missing = query.shape[3] - value.shape[3]
    if missing > 0:
        value = functional.pad(value, (0, missing))
    elif missing < 0:
        query, key = functional.pad(query, (0, -missing)), functional.pad(key, (0, -missing))
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    return query, key, value
