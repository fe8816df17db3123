"""Blocks of keys that a block of queries sees for their content, beside its neighbours, in Nyström attention.

A block of queries looks at the far blocks that get most of its weight, to the second order: of log Σ exp(q·k) over the
c keys of a block, log c + q·E[k] + ½ q²·Var[k] is known from means and variances of its keys, and the mean over the
queries of a block from the means of q and q². Comparing all blocks with all would take (n/s)²·d operations, a share of
1/s² of exact attention, but still no O(n): from `MOST_CANDIDATES` blocks on, only those that the core rows look at most
are compared.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nystromformer.attention.native import moments, runs_native
from nystromformer.attention.nystrom_local_parts import ChosenBlocks, HeavyKeys, TokenBlocks, ranked
from nystromformer.attention.partial_softmax import (
    MASKED,
    attention_with_lse,
    few_at_once,
    part_backward,
    part_forward,
    row_contiguous,
)

MOST_CANDIDATES = 256
"""Blocks of keys that each block of queries is compared with."""


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


class _GatheredPart(Function):
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
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, rows, bias, out, logsumexp = ctx.saved_tensors
        flat_key, flat_value = (x.reshape(-1, x.shape[2]) for x in (key, value))
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=logsumexp.dtype) for x in (flat_key, flat_value))
        for some in few_at_once(query.shape[0]):
            k, v = _gather(flat_key, rows[some]), _gather(flat_value, rows[some])
            grad_query[some], *others = part_backward(
                grad[some], grad_logsumexp[some], query[some], k, v, bias[some], out[some], logsumexp[some], ctx.scale
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
