"""Rows of the approximated attention matrix, for heatmaps, without the n×n matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nystromformer.attention.checks import check_mask, check_query_key_value
from nystromformer.attention.masks import attendable, zero_padding
from nystromformer.attention.nystrom_core import NystromOptions, checked_scale, landmark_core, masked_softmax
from nystromformer.attention.pseudoinverse import full_precision


def nystrom_attention_weights(
    query: Tensor,
    key: Tensor,
    rows: Sequence[int] | Tensor,
    num_landmarks: int = 64,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    pinv_iterations: int = 6,
    pinv_scaling: str = "matrix",
    scale: float | None = None,
    landmarks: str = "segment_means",
    pinv: str = "iterative",
) -> Tensor:
    """The asked rows of the approximated softmax matrix: (b, h, len(rows), s), in O((n + s)·m) time and memory.

    Multiplied by `value` they give those rows of `nystrom_attention` (without its convolution). `rows=[0]` is how a
    CLS token looks at all others. Approximated weights can be slightly negative; rows sum to about 1.

    >>> query = key = torch.randn(1, 2, 1000, 16)
    >>> nystrom_attention_weights(query, key, rows=[0, -1]).shape
    torch.Size([1, 2, 2, 1000])
    """
    check_query_key_value(query, key)
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
    rows = _checked_rows(rows, query)

    with full_precision(query):
        dtype, wide = query.dtype, torch.promote_types(query.dtype, torch.float32)
        query, key = zero_padding(query, query_mask).to(wide), zero_padding(key, key_mask).to(wide)
        asked = query[:, :, rows]  # (b h r d)
        exact = masked_softmax(scale * asked @ key.mT, attendable(key_mask))  # (b h r s)
        if query.shape[2] <= num_landmarks or key.shape[2] <= num_landmarks:
            weights = exact
        else:
            core = landmark_core(query, key, query_mask, key_mask, scale, options)
            F = masked_softmax(scale * asked @ core.keys.mT, core.attendable_keys)  # (b h r m)
            B = masked_softmax(scale * core.queries @ key.mT, attendable(key_mask))  # (b h m s)
            few = core.query_segments.one_token_each | core.key_segments.one_token_each
            weights = torch.where(few[:, None, None, None], exact, F @ core.inverse @ B)
        if key_mask is not None:
            weights = weights.masked_fill(~key_mask[:, None, None, :], 0)
        return zero_padding(weights, None if query_mask is None else query_mask[:, rows]).to(dtype)


def _checked_rows(rows: Sequence[int] | Tensor, query: Tensor) -> Tensor:
    """`rows` as a tensor of indices into the queries; negative ones count from the end."""
    length = query.shape[2]
    index = torch.as_tensor(rows, device=query.device)
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool or index.numel() == 0:
        raise TypeError(f"rows={rows!r}: must be a list of one or more whole numbers, as rows=[0].")
    if bool(((index < -length) | (index >= length)).any()):
        raise ValueError(f"rows={rows!r}: must lie between {-length} and {length - 1}, for {length} queries.")
    return index % length
