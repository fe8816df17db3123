"""Nyström attention over a sequence that is split over ranks, equal to that of one process.

What a rank needs to know of the others is small and does not grow with the sequence. In numbers for each head:

    layout      tokens and valid tokens of each shard, so that segments are counted over the whole sequence
    landmarks   Q̃ and K̃: each rank's share in the means of the segments, summed                   2·m·d
    merge       B V: each rank's softmax(Q̃ Kᵀ) V over its own keys, by their log-sum-exps          m·(e + 2)
    halo        k//2 rows of V from each side, for the convolution                                 2·(k//2)·e

The pseudoinverse and F W need nothing else: every rank computes them alone.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nystromformer.attention.landmarks import at_least_float32, means_over
from nystromformer.attention.masks import zero_padding
from nystromformer.attention.nystrom import equal_widths, softmax_attention
from nystromformer.attention.nystrom_core import NystromOptions, softmax_inverse
from nystromformer.attention.pseudoinverse import full_precision
from nystromformer.attention.softmax_parts import FUSED_DEVICES, MASKED, softmax_part
from nystromformer.distributed.agreement import agree
from nystromformer.distributed.collectives import check_group, max_over_ranks, sum_over_ranks
from nystromformer.distributed.convolution import add_sharded_convolution
from nystromformer.distributed.inputs import Inputs, checked_inputs
from nystromformer.distributed.layout import Layout

KEYS_AT_ONCE = 8192
"""Where no fused kernel gives the log-sum-exp, a matrix (landmarks × this many keys) exists for a while."""


def sequence_parallel_nystrom_attention(
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
    *,
    group: ProcessGroup | None = None,
    layouts: tuple[Layout, Layout] | None = None,
    check: bool = True,
) -> Tensor:
    """`nystrom_attention` of a whole sequence, at this rank's contiguous shard of it: (b, h, n, e).

    Every rank of `group` (None: all processes) calls this with its own tokens. Shards follow each other in the order of
    the ranks, may differ in length and may be empty. Forward and backward equal those of `nystrom_attention` on the
    whole sequence. Gradients are those of the sum of all ranks' losses, and every rank must call `backward`.

    Args:
        query, key, value, query_mask, key_mask: this rank's rows of what `nystrom_attention` takes. A rank may leave
            out a mask that others give.
        num_landmarks, conv_weight, pinv_iterations, pinv_scaling, scale, pinv: as there, the same on all ranks.
        landmarks: only "segment_means".
        layouts: of the queries and the keys, where they are known already: several layers that work on one sequence
            need to ask only once (`share_layouts`).
        check: compare what the ranks were given before any data is sent, and refuse on all of them where it differs.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: "gloo" alone
    >>> query = key = value = torch.randn(2, 8, 1000, 64)
    >>> sequence_parallel_nystrom_attention(query, key, value, num_landmarks=32).shape
    torch.Size([2, 8, 1000, 64])
    >>> dist.destroy_process_group()
    """
    check_group(group)
    rows = query.shape[2] if isinstance(query, Tensor) and query.dim() == 4 else 0
    try:
        options = NystromOptions(
            num_landmarks=num_landmarks,
            pinv_iterations=pinv_iterations,
            pinv_scaling=pinv_scaling,
            landmarks=landmarks,
            pinv=pinv,
        )
        inputs = checked_inputs(query, key, value, query_mask, key_mask, conv_weight, scale, options)
    except (TypeError, ValueError) as error:
        if check and layouts is None:  # the others wait for this rank's facts: they get its error
            agree(error, (0, 0), group, query.device if isinstance(query, Tensor) else "cpu")
        raise
    if layouts is None:
        layouts = inputs.layouts(group, check)
    with full_precision(inputs.query):
        out = _attend(inputs, layouts, group)
        if inputs.kernel is not None:
            out = add_sharded_convolution(out, inputs.value, inputs.kernel, layouts[1], group)
        return zero_padding(out, inputs.query_mask)[:, :, :rows]


def _attend(inputs: Inputs, layouts: tuple[Layout, Layout], group: ProcessGroup | None) -> Tensor:
    """F A⁺ B V at this rank's queries, exact for each example with at most m valid keys or queries on all ranks.

    What is done may depend on what all ranks know, never on one shard alone: else collectives would not match.
    """
    query, key, value, scale, dtype = inputs.query, inputs.key, inputs.value, inputs.scale, inputs.value.dtype
    m = inputs.options.num_landmarks
    query_segments = layouts[0].segments(inputs.query_mask, query.shape[2], m)
    key_segments = layouts[1].segments(inputs.key_mask, key.shape[2], m)
    few_queries, few_keys = (layout.fewest <= m for layout in layouts)

    shares = [means_over(query, query_segments), means_over(key, key_segments)]
    if few_keys:
        shares.append(means_over(value, key_segments))
    widths = [share.shape[3] for share in shares]
    queries, keys, *own_values = sum_over_ranks(torch.cat(shares, dim=3), group, "landmarks").split(widths, dim=3)

    query_occupied = query_segments.occupied[:, None] if few_queries else None  # (b 1 m)
    occupied = key_segments.occupied[:, None, None] if few_keys else None  # (b 1 1 m)
    allowed = None if occupied is None else occupied | ~occupied.any(-1, keepdim=True)
    Z = softmax_inverse(queries, keys, query_occupied, allowed, scale, inputs.options)  # (b h m m)
    BV = _from_landmarks(queries.to(dtype), key, value, inputs.key_mask, scale, group)  # (b h m e)
    W = Z @ BV
    if few_keys:
        # With one key a segment K̃ = K, so that F is the exact softmax matrix and belongs to the values themselves.
        W = torch.where(key_segments.one_token_each[:, None, None, None], own_values[0], W)
    out = softmax_attention(query, keys.to(dtype), W.to(dtype), allowed, scale)
    if few_queries:
        # With one query a segment Q̃ = Q, so that B V already holds the exact row of each query.
        index = query_segments.index[:, None, :, None].expand(-1, BV.shape[1], -1, BV.shape[3])
        own_rows = BV.to(dtype).gather(2, index)
        out = torch.where(query_segments.one_token_each[:, None, None, None], own_rows, out)
    return out


def _from_landmarks(
    queries: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, group: ProcessGroup | None
) -> Tensor:
    """B V = softmax(scale · Q̃ Kᵀ) V over the keys of all ranks: (b, h, m, e), at least float32."""
    wide, width = at_least_float32(value.dtype), value.shape[3]
    bias = torch.zeros(len(key), 1, 1, key.shape[2], dtype=wide, device=key.device)
    if mask is not None:
        bias.masked_fill_(~mask[:, None, None], MASKED)
    queries, key, value = equal_widths(queries, key, value)
    at_once = key.shape[2] if key.device.type in FUSED_DEVICES else KEYS_AT_ONCE
    pieces = zip(key.split(at_once, dim=2), value.split(at_once, dim=2), bias.split(at_once, dim=3), strict=True)
    parts = [softmax_part(queries, keys, values, biases, scale) for keys, values, biases in pieces]
    out = torch.stack([part_out[..., :width].to(wide) for part_out, _ in parts])  # (pieces b h m e)
    logsumexp = torch.stack([part_logsumexp for _, part_logsumexp in parts])[..., None]  # (pieces b h m 1)
    # Shifted by the largest of all ranks, no weight exceeds 1 and their sum is at least 1.
    weight = torch.exp(logsumexp - max_over_ranks(logsumexp.amax(dim=0), group, "merge"))
    total = sum_over_ranks(torch.cat((weight * out, weight), dim=4).sum(dim=0), group, "merge")
    return total[..., :width] / total[..., width:]
