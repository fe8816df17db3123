"""The exact near field of Nyström attention: the keys that each block of queries sees as they are.

They are those of the block itself, of its neighbors and, where asked for, of blocks chosen for it. Machine code of our
own sees them where they lie, together with the far field, in one softmax. Elsewhere the near part of all queries is
made by itself and merged with the far one.

A block of queries chooses the far blocks that get most of its weight, to the second order: of log Σ exp(q·k) over the
c keys of a block, log c + q·E[k] + ½ q²·Var[k] is known from means and variances of its keys, and the mean over the
queries of a block from the means of q and q². Comparing all blocks with all would take (n/s)²·d operations, a share of
1/s² of exact attention, but still no O(n): from `MOST_CANDIDATES` blocks on, only those that the core rows look at most
are compared.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nystromformer.attention.native import MOST_COLUMNS, local_attention, moments, near_attention, runs_native
from nystromformer.attention.nystrom_local.parts import ChosenBlocks, FarField, HeavyKeys, TokenBlocks, ranked
from nystromformer.attention.shared.partial_softmax import (
    MASKED,
    KeepsLogSumExp,
    attention_with_lse,
    few_at_once,
    merge,
    merge_parts,
    part_backward,
    part_forward,
    row_contiguous,
    shared_part,
    window_part,
)

MOST_CANDIDATES = 256
"""Blocks of keys that each block of queries is compared with."""


class NearField(Protocol):
    def of_rows(self, query: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Attention (c, r, e) of the queries (c, r, d) in `places` (c, r) to their near keys, and its log-sum-exp."""

    def with_far(self, far: FarField, values: Tensor) -> Tensor:
        """Attention (l, c, e) of all queries to their near keys and to `far` with these values (c, m, e)."""


def sees_in_place(blocks: TokenBlocks, *tensors: Tensor) -> bool:
    """Whether machine code serves blocks of this size, so that sequences need no margins."""
    return blocks.size <= MOST_COLUMNS and runs_native(*tensors)


@dataclass(frozen=True)
class Sequences:
    """What near fields are made of."""

    query: Tensor  # (l, c, d)
    key: Tensor  # (l, c, d); for `SeenInParts` with a margin of a block of zeros at both ends
    value: Tensor  # (l, c, e), as the keys
    bias: Tensor  # (c, l or more): of each key
    chosen: ChosenBlocks | None
    blocks: TokenBlocks
    scale: float


@dataclass(frozen=True)
class SeenInPlace:
    query: Tensor
    keys: tuple[Tensor, Tensor, Tensor, Tensor | None]  # key, value, bias, and chosen blocks (c, blocks, k)
    block: int
    scale: float

    @classmethod
    def of(cls, x: Sequences) -> "SeenInPlace":
        chosen = None if x.chosen is None else x.chosen.index_or_none
        return cls(x.query, (x.key, x.value, x.bias, chosen), x.blocks.size, x.scale)

    def of_rows(self, query: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return near_attention(query, places, *self.keys, self.block, self.scale)

    def with_far(self, far: FarField, values: Tensor) -> Tensor:
        return local_attention(self.query, *self.keys, far.key, values, far.bias[:, :, 0], self.block, self.scale)


@dataclass(frozen=True)
class SeenInParts:
    query: Tensor  # (g, c, s, d)
    near: tuple[Tensor, Tensor]  # attention of all queries to their near keys, and its log-sum-exp
    blocks: TokenBlocks
    scale: float

    @classmethod
    def of(cls, x: Sequences) -> "SeenInParts":
        s = x.blocks.size
        query = x.query.unflatten(0, (x.blocks.number, s)).transpose(1, 2)
        near = window_part(query, x.key, x.value, near_bias(x.bias, x.blocks), x.scale, s)
        if x.chosen is not None:
            seen = x.key[s:-s], x.value[s:-s], x.bias, x.chosen, x.blocks
            near = merge_parts(near, chosen_part(query, *seen, x.scale))
        return cls(query, near, x.blocks, x.scale)

    def of_rows(self, query: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        out, logsumexp = (self.blocks.pick(x.transpose(1, 2).flatten(0, 1), places) for x in self.near)
        return out, logsumexp

    def with_far(self, far: FarField, values: Tensor) -> Tensor:
        dtype = self.query.dtype
        part = shared_part(self.query, far.key.to(dtype), values.to(dtype), far.bias, self.scale)
        return merge(self.near, part).transpose(1, 2).flatten(0, 1)


def near_bias(bias: Tensor, blocks: TokenBlocks) -> Tensor:
    """`bias` (c, number·size) for the window of each block: (number, c, 1, 3·size), as views."""
    bias = functional.pad(bias, (blocks.size, blocks.size), value=MASKED)
    return bias.unfold(1, 3 * blocks.size, blocks.size).transpose(0, 1)[:, :, None]


@torch.no_grad()
def choose_blocks(
    query: Tensor, key: Tensor, heavy: HeavyKeys, blocks: TokenBlocks, scale: float, number: int
) -> ChosenBlocks:
    """The `number` far blocks with the most weight, to the second order, for each block of queries.

    `query` and `key` are (g·s, c, d), zeros where there is no token; there must be at least as many blocks as `number`.
    For machine code the last block need not be full.
    """
    wide, g = heavy.column_sums.dtype, blocks.number
    counts = blocks.for_heads(blocks.present).unflatten(1, (g, blocks.size)).sum(2)  # (c g)
    tokens = counts.clamp(min=1)[..., None]
    mean, square = (sums / tokens for sums in _moments(key, blocks, wide))
    of_keys = torch.cat((mean, (square - mean.square()).clamp(min=0), tokens.to(wide).log()), dim=2)  # (c g 2d+1)
    mean, square = (sums / tokens for sums in _moments(query, blocks, wide))
    of_queries = torch.cat((scale * mean, scale**2 / 2 * square, torch.ones_like(mean[..., :1])), dim=2)

    block, head = torch.arange(g, device=key.device), torch.arange(of_keys.shape[0], device=key.device)
    candidates = _candidates(heavy, blocks, max(MOST_CANDIDATES, number))
    place = block
    if candidates is not None:
        exists, candidates = candidates < g, candidates.clamp(max=g - 1)
        of_keys = of_keys[head[:, None], candidates]
        counts = counts.gather(1, candidates) * exists
        place = candidates[:, None]  # (c 1 g')
    logits = of_queries @ of_keys.mT  # (c g g')
    far = ((place - block[:, None]).abs() > 1) & (counts > 0)[:, None]
    logits = logits.masked_fill(~far, MASKED)
    weight = (logits - logits.amax(2, keepdim=True)).exp().float()
    order = torch.where(far, ranked(weight, place, g), -1 - g - place)
    chosen = order.topk(number, dim=2).indices  # (c g k)
    index = chosen if candidates is None else candidates[head[:, None, None], chosen]
    return ChosenBlocks(index, far.gather(2, chosen))


def _moments(x: Tensor, blocks: TokenBlocks, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sums and sums of squares over each block of `x` (g·s, c, d): (c, g, d)."""
    if runs_native(x):
        return moments(x, blocks.size)
    x = x.unflatten(0, (blocks.number, blocks.size))
    # Squares in memory are of the size of the input, and take a tenth of the time of a norm along this axis.
    return x.sum(1, dtype=dtype).transpose(0, 1), x.to(dtype).square().sum(1).transpose(0, 1)


def _candidates(heavy: HeavyKeys, blocks: TokenBlocks, most: int) -> Tensor | None:
    """The blocks (c, g') that core rows look at most, heavy keys aside; None where all are few enough.

    An exported graph, which serves all lengths, always has `most`: blocks that do not exist come after all that do.
    """
    exporting = torch.compiler.is_exporting()
    if not exporting and blocks.number <= most:
        return None
    sums = (heavy.column_sums * blocks.for_heads(blocks.present)).scatter(1, heavy.place, 0)
    mass = sums.unflatten(1, (blocks.number, blocks.size)).sum(2)  # (c g)
    mass = functional.pad(mass, (0, most)) if exporting else mass
    block = torch.arange(mass.shape[1], device=mass.device)
    return ranked(mass.float(), block, mass.shape[1]).topk(most, dim=1).indices.sort(dim=1).values


def chosen_part(
    query: Tensor, key: Tensor, value: Tensor, free: Tensor, chosen: ChosenBlocks, blocks: TokenBlocks, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each block of queries (g, c, s, d) to its chosen blocks of `key` and `value` (g·s, c, d), and its
    log-sum-exp, as `attention_with_lse` gives them. `free` (c, g·s) is 0 for a key to see and `MASKED` for others."""
    s, heads = blocks.size, query.shape[1]
    head = torch.arange(heads, device=query.device)[:, None, None]
    bias = free.unflatten(1, (blocks.number, s))[head, chosen.index]  # (c g k s)
    bias = bias.masked_fill(~chosen.real[..., None], MASKED)
    place = chosen.index[..., None] * s + torch.arange(s, device=query.device)  # (c g k s)
    row = place * heads + head[..., None]
    rows, bias = (x.flatten(2).transpose(0, 1) for x in (row, bias))  # (g c k·s)
    return _GatheredPart.apply(row_contiguous(query), key, value, rows, bias[:, :, None], scale)


class _GatheredPart(KeepsLogSumExp, Function):
    """Keys and values are gathered for a few blocks at a time, so that they stay in a cache, in both directions."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, rows: Tensor, bias: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        key, value = (x.reshape(-1, x.shape[2]) for x in (key, value))
        attend = part_forward if torch.compiler.is_compiling() else attention_with_lse  # on machine code of our own
        parts = [
            attend(query[some], _gather(key, rows[some]), _gather(value, rows[some]), bias[some], scale)
            for some in few_at_once(query.shape[0])
        ]
        if len(parts) == 1:
            return parts[0]
        outs, sums = zip(*parts, strict=True)
        return torch.cat(outs), torch.cat(sums)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        (query, key, value, rows, bias, out, logsumexp), (scale,) = ctx.saved_tensors, ctx.settings
        flat_key, flat_value = (x.reshape(-1, x.shape[2]) for x in (key, value))
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=logsumexp.dtype) for x in (flat_key, flat_value))
        for some in few_at_once(query.shape[0]):
            k, v = _gather(flat_key, rows[some]), _gather(flat_value, rows[some])
            grad_query[some], *others = part_backward(
                grad[some], grad_logsumexp[some], query[some], k, v, bias[some], out[some], logsumexp[some], scale
            )
            for total, part in zip((grad_key, grad_value), others, strict=True):
                total.index_add_(0, rows[some].flatten(), part.reshape(-1, part.shape[3]).to(total.dtype))
        return (
            grad_query,
            grad_key.view(key.shape).to(key.dtype),
            grad_value.view(value.shape).to(value.dtype),
            *(None,) * 3,
        )


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """Rows (g, c, k) of `x` (l·c, d): (g, c, k, d)."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, x.shape[1])
