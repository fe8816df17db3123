"""Nyström attention: softmax attention in linear time and memory, through m landmarks.

With landmarks Q̃, K̃ of the queries and keys (paper, eq. 13 to 15):

    F = softmax(Q K̃ᵀ/√d)   A = softmax(Q̃ K̃ᵀ/√d)   B = softmax(Q̃ Kᵀ/√d)   out = F A⁺ B V + conv(V)

B V is ordinary attention with m queries, and F W with W = A⁺ (B V) is ordinary attention with m keys. So the whole is
two calls of `scaled_dot_product_attention` around a small pseudoinverse, and no n×m matrix ever exists.
"""

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from nystromformer.attention.base import Attention, with_options
from nystromformer.attention.nystrom.core import (
    NystromKeywords,
    NystromOptions,
    attend_and_skip,
    attend_within,
    landmark_core,
    masked_softmax,
    takes_spans,
)
from nystromformer.attention.nystrom.varlen import nystrom_attention_varlen
from nystromformer.attention.shared.common import (
    all_are_short,
    all_valid,
    at_least_float32,
    check_mask,
    check_query_key_value,
    checked_masks,
    checked_rows,
    checked_scale,
    full_precision,
    is_readable,
    key_padding_mask,
    refuse_causal,
    refuse_forward_mode,
    shape_of,
    short_examples,
    zero_masked,
)
from nystromformer.attention.shared.skip_convolution import SkipConvolution, kernel_of
from nystromformer.attention.shared.varlen import own_calls_pay, valid_spans
from nystromformer.checks import check_at_least, check_fraction, check_odd


def nystrom_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
    num_landmarks: int = 64,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    conv_weight: Tensor | None = None,
    pinv_iterations: int = 6,
    pinv_scaling: str = "matrix",
    landmarks: str = "segment_means",
    grid_shape: Sequence[int] | None = None,
    pinv: str = "iterative",
    exact_below: int | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    """Softmax attention approximated in O(n·m): (b, h, n, e), in the dtype of `value`.

    Args:
        query, key, value: (b, h, n, d), (b, h, s, d), (b, h, s, e); n ≠ s is cross-attention.
        mask: boolean (b, n), True for real tokens, anywhere: of both sequences of self-attention. Masked rows of the
            result are 0; what stands at masked positions, and how many there are, changes nothing.
        num_landmarks: m. The result is exact for an example with at most m valid keys or at most m valid queries.
        query_mask, key_mask: boolean (b, n) and (b, s), in place of `mask` for cross-attention.
        conv_weight: the skip convolution's kernel for each head, (h, k) or (h, 1, k, 1), k odd; needs n = s.
        pinv_iterations: steps of the pseudoinverse; more are not safer (`iterative_pinv`).
        pinv_scaling: "matrix", or "batch" as published checkpoints were trained: outputs then depend on the batch.
        landmarks: "segment_means"; "kmeans" (slower; the paper mentions it); "fps", tokens that are far from each other
            (slower, too); or "grid", means over the tiles of a grid.
        grid_shape: rows and columns of the tokens, for landmarks="grid": n = s = rows · columns.
        pinv: "iterative" or "exact" (slow; for studies).
        exact_below: examples with at most so many valid queries and keys are computed exactly; None: with at most m.
        scale: of the logits, d ** -0.5 by default.
        is_causal: refused when true. Landmarks average over later tokens, so this attention can't be causal.

    >>> query = key = value = torch.randn(2, 8, 1000, 64)
    >>> nystrom_attention(query, key, value, num_landmarks=32).shape
    torch.Size([2, 8, 1000, 64])
    """
    check_query_key_value(query, key, value)
    query_mask, key_mask = checked_masks(query, key, mask, query_mask, key_mask)
    options = NystromOptions(
        num_landmarks=num_landmarks,
        pinv_iterations=pinv_iterations,
        pinv_scaling=pinv_scaling,
        landmarks=landmarks,
        grid_shape=grid_shape,
        pinv=pinv,
        exact_below=exact_below,
    )
    scale = checked_scale(scale, query)
    refuse_causal(is_causal)
    refuse_forward_mode(query, key, value, conv_weight)
    if conv_weight is not None:
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"conv_weight was given with {query.shape[2]} queries and {key.shape[2]} keys: the skip convolution "
                f"needs as many; leave conv_weight out for cross-attention."
            )
        conv_weight = kernel_of(conv_weight, value.shape[1], value.dtype)

    with full_precision(query):
        # Scaling by the batch needs the batch together.
        alone = query_mask is key_mask and pinv_scaling == "matrix" and grid_shape is None
        if alone and query_mask is not None and is_readable(query_mask):
            ways = 1 if options.exact_up_to == num_landmarks else 2
            worth_it = takes_spans(query, key, value, conv_weight, options) or own_calls_pay(query, ways)
            spans = valid_spans(query_mask) if worth_it else None
            if spans is not None:
                return attend_within(spans, query, key, value, conv_weight, scale, options)
        query, key, value = zero_masked(query, query_mask), zero_masked(key, key_mask), zero_masked(value, key_mask)
        out = attend_and_skip(query, key, value, query_mask, key_mask, conv_weight, scale, options)
        return zero_masked(out, query_mask)


@with_options(NystromOptions)
def nystrom_attention_weights(
    query: Tensor,
    key: Tensor,
    rows: Sequence[int] | Tensor,
    mask: Tensor | None = None,
    *,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    **options: Unpack[NystromKeywords],
) -> Tensor:
    """The asked rows of the approximated softmax matrix: (b, h, len(rows), s), in O((n + s)·m) time and memory.

    Multiplied by `value` they give those rows of `nystrom_attention` (without its convolution). `rows=[0]` is how a
    CLS token looks at all others. Approximated weights can be slightly negative; rows sum to about 1.

    >>> query = key = torch.randn(1, 2, 1000, 16)
    >>> nystrom_attention_weights(query, key, rows=[0, -1]).shape
    torch.Size([1, 2, 2, 1000])
    """
    check_query_key_value(query, key)
    query_mask, key_mask = checked_masks(query, key, mask, query_mask, key_mask)
    given = NystromOptions(**options)
    scale = checked_scale(scale, query)
    rows = checked_rows(rows, query)

    with full_precision(query):
        dtype, wide = query.dtype, at_least_float32(query.dtype)
        query, key = zero_masked(query, query_mask).to(wide), zero_masked(key, key_mask).to(wide)
        asked = query[:, :, rows]  # (b h r d)
        exact = masked_softmax(scale * asked @ key.mT, key_padding_mask(key_mask))  # (b h r s)
        if min(query.shape[2], key.shape[2]) <= given.num_landmarks or all_are_short(query, key, given.exact_below):
            weights = exact
        else:
            core = landmark_core(query, key, query_mask, key_mask, scale, given)
            F = masked_softmax(scale * asked @ core.keys.mT, core.attendable_keys)  # (b h r m)
            B = masked_softmax(scale * core.queries @ key.mT, key_padding_mask(key_mask))  # (b h m s)
            few = core.query_segments.one_token_each | core.key_segments.one_token_each
            few = few | short_examples(query, key, query_mask, key_mask, given.exact_below)
            weights = torch.where(few[:, None, None, None], exact, F @ core.inverse @ B)
        if key_mask is not None:
            weights = weights.masked_fill(~key_mask[:, None, None, :], 0)
        return zero_masked(weights, None if query_mask is None else query_mask[:, rows]).to(dtype)


class LandmarkAttention(Attention):
    """What attentions with landmarks share: their options, and a skip convolution."""

    size_option = "num_landmarks"
    takes_convolution = True

    def __init__(
        self, num_heads: int, head_dim: int, max_length: int | None, options: Any, conv_kernel_size: int | None
    ) -> None:
        super().__init__(num_heads, head_dim, max_length)
        self.options = options
        if conv_kernel_size is not None:
            check_odd("conv_kernel_size", conv_kernel_size)
        self.conv = None if conv_kernel_size is None else SkipConvolution(num_heads, conv_kernel_size)

    @property
    def exact_up_to(self) -> float:
        return self.options.exact_up_to

    def arguments(self, query: Tensor) -> dict[str, Any]:
        return {**vars(self.options), "conv_weight": None if self.conv is None else self.conv.weight}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.options}"


class NystromSelfAttention(LandmarkAttention):
    """`nystrom_attention` with its skip convolution, as `build_attention("nystrom-64", ...)` makes it."""

    name = "nystrom"
    operation = staticmethod(nystrom_attention)
    packed_operation = staticmethod(nystrom_attention_varlen)
    cross_attention = True
    splits_over_ranks = True

    @with_options(NystromOptions)
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_length: int | None = None,
        *,
        conv_kernel_size: int | None = 33,
        **options: Unpack[NystromKeywords],
    ) -> None:
        super().__init__(num_heads, head_dim, max_length, NystromOptions(**options), conv_kernel_size)

    def weights(self, query: Tensor, key: Tensor, rows: Sequence[int] | Tensor, mask: Tensor | None = None) -> Tensor:
        """`nystrom_attention_weights`, with gradients."""
        return nystrom_attention_weights(query, key, rows, mask, **vars(self.options))


class NystromAttention(nn.Module):
    """Multi-head Nyström attention: projections, `nystrom_attention` with its skip convolution, output projection.

    Args:
        dim: width of the input and the output.
        num_heads, head_dim: `head_dim` is dim / num_heads by default.
        num_landmarks: m; exact for examples with at most m valid tokens.
        conv_kernel_size: odd; None leaves the skip convolution out.
        pinv_iterations: steps of the pseudoinverse.
        exact_below: examples with at most so many valid tokens are computed exactly, even if there are more than m.
        dropout: on the output.
        bias: of the four projections.

    >>> layer = NystromAttention(dim=256, num_heads=8)
    >>> x = torch.randn(2, 1000, 256)
    >>> mask = torch.arange(1000) < torch.tensor([[1000], [700]])
    >>> layer(x, mask=mask).shape
    torch.Size([2, 1000, 256])
    """

    operation = staticmethod(nystrom_attention)
    """What attends. An instance can be given another function of this signature: `nystromformer.distributed` does."""
    splits_over_ranks = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | None = None,
        num_landmarks: int = 64,
        conv_kernel_size: int | None = 33,
        pinv_iterations: int = 6,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        exact_below: int | None = None,
    ) -> None:
        super().__init__()
        check_at_least("dim", dim, 1)
        check_at_least("num_heads", num_heads, 1)
        check_fraction("dropout", dropout)
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}: change one, or give head_dim.")
            head_dim = dim // num_heads
        check_at_least("head_dim", head_dim, 1)
        if conv_kernel_size is not None:
            check_odd("conv_kernel_size", conv_kernel_size)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim
        self.options = NystromOptions(
            num_landmarks=num_landmarks, pinv_iterations=pinv_iterations, exact_below=exact_below
        )
        self.query = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.key = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.value = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.conv = None if conv_kernel_size is None else SkipConvolution(num_heads, conv_kernel_size)
        self.output = nn.Linear(num_heads * head_dim, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None,
        context_mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend from `x` (b, n, dim) to itself, or to `context` (b, s, dim): (b, n, dim).

        With `cu_seqlens` (b + 1), from 0 to the number of tokens, `x` (tokens, dim) holds sequences one after the
        other, of which each gives what it gives alone.


        `mask` (b, n) and `context_mask` (b, s) are True for real tokens. Masked rows of the attention's output are 0
        before the output projection. The skip convolution belongs to self-attention: with a context it is not used.
        """
        if cu_seqlens is not None:
            return self._attend_packed(x, cu_seqlens, {"mask": mask, "context": context, "context_mask": context_mask})
        self._check_input("x", x)
        check_mask("mask", mask, x)
        if context is None:
            if context_mask is not None:
                raise ValueError("context_mask was given without context: give both, or use mask for x.")
            source = x
            masks: dict[str, Any] = {"mask": mask}
        else:
            self._check_input("context", context)
            check_mask("context_mask", context_mask, context)
            source, masks = context, self._masks_of_two(x, mask, context, context_mask)
        out = self.operation(
            self._split_heads(self.query(x)),
            self._split_heads(self.key(source)),
            self._split_heads(self.value(source)),
            **masks,
            conv_weight=self.conv.weight if self.conv is not None and context is None else None,
            **vars(self.options),
        )
        return self.dropout(self.output(out.transpose(1, 2).flatten(2)))

    def _attend_packed(self, x: Tensor, cu_seqlens: Tensor, others: dict[str, Tensor | None]) -> Tensor:
        for name, given in others.items():
            if given is not None:
                raise ValueError(f"{name} was given with cu_seqlens: packed sequences attend to themselves, unpadded.")
        if "operation" in vars(self):
            raise ValueError("cu_seqlens was given where sequences are split over processes: give a batch and mask.")
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != self.dim:
            given_shape = shape_of(x) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x is {given_shape}: with cu_seqlens it must be (tokens, {self.dim}).")
        query, key, value = (
            project(x).unflatten(1, (self.num_heads, self.head_dim)) for project in (self.query, self.key, self.value)
        )  # (t h d)
        kernel = None if self.conv is None else self.conv.weight
        out = nystrom_attention_varlen(query, key, value, cu_seqlens, conv_weight=kernel, **vars(self.options))
        return self.dropout(self.output(out.flatten(1)))

    @staticmethod
    def _masks_of_two(
        x: Tensor, mask: Tensor | None, context: Tensor, context_mask: Tensor | None
    ) -> dict[str, Tensor]:
        """Here, where it is known that there are two sequences, a mask that was left out means that all is valid."""
        if mask is None and context_mask is None:
            return {}
        return {
            "query_mask": all_valid(x) if mask is None else mask,
            "key_mask": all_valid(context) if context_mask is None else context_mask,
        }

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)  # (b h n d)

    def _check_input(self, name: str, x: Tensor) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: must be a torch.Tensor.")
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"{name} has shape {shape_of(x)}: must be (batch, length, {self.dim}).")
