"""Nyström attention over a sequence that is split over ranks, equal to that of one process.

What a rank needs to know of the others is small and does not grow with the sequence. In numbers for each head:

    layout      tokens and valid tokens of each shard, so that segments are counted over the whole sequence
    landmarks   Q̃ and K̃: each rank's share in the means of the segments, summed                   2·m·d
    merge       B V: each rank's softmax(Q̃ Kᵀ) V over its own keys, by their log-sum-exps          m·(e + 2)
    halo        k//2 rows of V from each side, for the convolution                                 2·(k//2)·e

The pseudoinverse and F W need nothing else: every rank computes them alone.
"""

from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn import functional

from nystromformer.attention.base import with_options
from nystromformer.attention.nystrom.core import NystromKeywords, NystromOptions, plus_skip, softmax_inverse
from nystromformer.attention.nystrom.landmarks import means_over
from nystromformer.attention.shared.common import (
    at_least_float32,
    check_mask,
    check_query_key_value,
    checked_scale,
    full_precision,
    pad_head_dims,
    softmax_attention,
    zero_masked,
)
from nystromformer.attention.shared.partial_softmax import FUSED_DEVICES, MASKED, attention_with_lse
from nystromformer.attention.shared.skip_convolution import kernel_of, skip_convolution
from nystromformer.distributed.collectives import agree, check_group, max_over_ranks, neighboring_rows, sum_over_ranks
from nystromformer.distributed.layout import Layout, share_layouts


def add_sharded_convolution(
    out: Tensor, value: Tensor, kernel: Tensor, layout: Layout, group: ProcessGroup | None
) -> Tensor:
    """`out` + `skip_convolution` of the whole sequence with `kernel` (h, k), at this rank's rows (b, h, n, e).

    The convolution is linear: the shard's own rows are convolved where they are, and what neighboring rows add to the
    first and last k//2 outputs is computed apart. So there is no copy of the shard together with its surroundings.
    """
    total = plus_skip(out, value, kernel)
    half = kernel.shape[1] // 2
    if half == 0 or layout.length == 0:  # a rank without rows takes no part: it needs none, and nobody needs any of it
        return total
    before, after = neighboring_rows(value, half, layout.lengths, group, "halo")
    rows = min(half, layout.length)
    own = value.new_zeros(*value.shape[:2], rows, value.shape[3])
    first = skip_convolution(torch.cat((before, own), dim=2), kernel)[:, :, half:]
    last = skip_convolution(torch.cat((own, after), dim=2), kernel)[:, :, :rows]
    return _AddAtEnds.apply(total, first, last)


class _AddAtEnds(Function):
    """In place; the built-in backward of such a sum would copy the whole gradient for each end."""

    @staticmethod
    def forward(total: Tensor, first: Tensor, last: Tensor) -> Tensor:
        total[:, :, : first.shape[2]] += first
        total[:, :, total.shape[2] - last.shape[2] :] += last
        return total

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.rows = inputs[1].shape[2]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad, grad[:, :, : ctx.rows], grad[:, :, grad.shape[2] - ctx.rows :]


@dataclass(frozen=True)
class Inputs:
    """This rank's shard. An empty one has a masked row of zeros, so that it takes part in all collectives."""

    query: Tensor  # (b h n d), masked rows 0
    key: Tensor  # (b h s d)
    value: Tensor  # (b h s e)
    query_mask: Tensor | None
    key_mask: Tensor | None
    kernel: Tensor | None  # (h k)
    scale: float
    options: NystromOptions
    query_rows: int  # as given: 0 for an empty shard
    key_rows: int

    def layouts(self, group: ProcessGroup | None, check: bool) -> tuple[Layout, Layout]:
        """How queries and keys are laid out; with `check` only where all ranks were given what fits together."""
        shards = [(self.query_rows, self.query_mask), (self.key_rows, self.key_mask)]
        facts = self.facts() if check else None
        queries, keys = share_layouts(shards, len(self.query), facts, group, self.query.device)
        return queries, keys

    def facts(self) -> dict[str, Any]:
        """What must be the same on all ranks: otherwise collectives would not match, forward or backward."""
        tensors = {"query": self.query, "key": self.key, "value": self.value, "conv_weight": self.kernel}
        return {
            "batch": self.query.shape[0],
            "heads": self.query.shape[1],
            "head size": self.query.shape[3],
            "value's head size": self.value.shape[3],
            "dtype": str(self.query.dtype),
            "device": self.query.device.type,
            "scale": self.scale,
            "kernel size": None if self.kernel is None else self.kernel.shape[1],
            "gradients": torch.is_grad_enabled(),
            "with gradient": [name for name, x in tensors.items() if x is not None and x.requires_grad],
            **vars(self.options),
        }


def checked_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    conv_weight: Tensor | None,
    scale: float | None,
    options: NystromOptions,
) -> Inputs:
    """Raise `TypeError` or `ValueError` unless all that this rank was given is in order."""
    query, query_mask, query_rows = _with_a_row(query, query_mask)
    key, key_mask, key_rows = _with_a_row(key, key_mask)
    value, _, _ = _with_a_row(value, None)
    check_query_key_value(query, key, value)
    check_mask("query_mask", query_mask, query)
    check_mask("key_mask", key_mask, key)
    if options.landmarks != "segment_means":
        raise ValueError(
            f"landmarks={options.landmarks!r}: must be 'segment_means' where a sequence is split over ranks; k-means "
            f"would exchange all its centers at every step."
        )
    if options.exact_below is not None:
        raise ValueError(
            f"exact_below={options.exact_below}: must be None where a sequence is split over ranks, since no rank has "
            f"all tokens of a short example; raise num_landmarks, up to which examples are exact."
        )
    if conv_weight is not None and query_rows != key_rows:
        raise ValueError(
            f"conv_weight was given with {query_rows} queries and {key_rows} keys on one rank: the skip convolution "
            f"needs as many; leave conv_weight out for cross-attention."
        )
    return Inputs(
        query=zero_masked(query, query_mask),
        key=zero_masked(key, key_mask),
        value=zero_masked(value, key_mask),
        query_mask=query_mask,
        key_mask=key_mask,
        kernel=None if conv_weight is None else kernel_of(conv_weight, value.shape[1], value.dtype),
        scale=checked_scale(scale, query),
        options=options,
        query_rows=query_rows,
        key_rows=key_rows,
    )


def masks_of_shards(
    mask: Tensor | None, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The masks of queries and of keys. One alone is allowed: a rank may have nothing to mask where others have."""
    if mask is None:
        return query_mask, key_mask
    if query_mask is not None or key_mask is not None:
        raise ValueError(
            "mask was given beside query_mask or key_mask: mask is for both sequences of self-attention; give mask "
            "alone, or query_mask and key_mask for cross-attention."
        )
    return mask, mask


def _with_a_row(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """`x`, its mask and the number of its rows. What is no (b, h, n, d) is left for the checks to refuse."""
    if not isinstance(x, Tensor) or x.dim() != 4:
        return x, mask, 0
    if x.shape[2] > 0:
        return x, mask, x.shape[2]
    return functional.pad(x, (0, 0, 0, 1)), torch.zeros(len(x), 1, dtype=torch.bool, device=x.device), 0


KEYS_AT_ONCE = 8192
"""Where no fused kernel gives the log-sum-exp, a matrix (landmarks × this many keys) exists for a while."""


@with_options(NystromOptions)
def sequence_parallel_nystrom_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    conv_weight: Tensor | None = None,
    scale: float | None = None,
    group: ProcessGroup | None = None,
    layouts: tuple[Layout, Layout] | None = None,
    check: bool = True,
    **options: Unpack[NystromKeywords],
) -> Tensor:  # fmt: skip
    """`nystrom_attention` of a whole sequence, at this rank's contiguous shard of it: (b, h, n, e).

    Every rank of `group` (None: all processes) calls this with its own tokens. Shards follow each other in the order of
    the ranks, may differ in length and may be empty. Forward and backward equal those of `nystrom_attention` on the
    whole sequence. Gradients are those of the sum of all ranks' losses, and every rank must call `backward`.

    Args:
        query, key, value, mask, query_mask, key_mask: this rank's rows of what `nystrom_attention` takes. A rank may
            leave out a mask that others give.
        num_landmarks, conv_weight, pinv_iterations, pinv_scaling, scale, pinv: as there, the same on all ranks.
        landmarks: only "segment_means".
        exact_below: only None.
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
        given = NystromOptions(**options)
        query_mask, key_mask = masks_of_shards(mask, query_mask, key_mask)
        inputs = checked_inputs(query, key, value, query_mask, key_mask, conv_weight, scale, given)
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
        return zero_masked(out, inputs.query_mask)[:, :, :rows]


def _attend(inputs: Inputs, layouts: tuple[Layout, Layout], group: ProcessGroup | None) -> Tensor:
    """F A⁺ B V at this rank's queries, exact for each example with at most m valid keys or queries on all ranks.

    What is done may depend on what all ranks know, never on one shard alone: otherwise collectives would not match.
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
        # With one key per segment K̃ = K, so that F is the exact softmax matrix and belongs to the values themselves.
        W = torch.where(key_segments.one_token_each[:, None, None, None], own_values[0], W)
    out = softmax_attention(query, keys.to(dtype), W.to(dtype), allowed, scale)
    if few_queries:
        # With one query per segment Q̃ = Q, so that B V already holds the exact row of each query.
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
    queries, key, value = pad_head_dims(queries, key, value)
    at_once = key.shape[2] if key.device.type in FUSED_DEVICES else KEYS_AT_ONCE
    pieces = zip(key.split(at_once, dim=2), value.split(at_once, dim=2), bias.split(at_once, dim=3), strict=True)
    parts = [attention_with_lse(queries, keys, values, biases, scale) for keys, values, biases in pieces]
    out = torch.stack([part_out[..., :width].to(wide) for part_out, _ in parts])  # (pieces b h m e)
    logsumexp = torch.stack([part_logsumexp for _, part_logsumexp in parts])[..., None]  # (pieces b h m 1)
    # Shifted by the largest of all ranks, no weight exceeds 1 and their sum is at least 1.
    weight = torch.exp(logsumexp - max_over_ranks(logsumexp.amax(dim=0), group, "merge"))
    total = sum_over_ranks(torch.cat((weight * out, weight), dim=4).sum(dim=0), group, "merge")
    return total[..., :width] / total[..., width:]
