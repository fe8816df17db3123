"""Attention of many blocks of queries to keys that they share, all or in part.

Keys are views: one set for all blocks, or windows that overlap. The gradient of what each block sees would be as large
as all views together. It is made for a few blocks at a time, and added to that of the keys themselves.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nystromformer.attention.softmax_parts import packed, part_backward, part_forward

BLOCKS_AT_ONCE = 16
"""In the backward: enough for all cores, few enough that what they need stays in a cache."""


def shared_part(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`softmax_part` for blocks of queries (g, c, n, d) that all see the same `key` and `value` (c, s, d)."""
    return _BlockwisePart.apply(packed(query), packed(key), packed(value), bias, scale, None)


def window_part(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, block: int
) -> tuple[Tensor, Tensor]:
    """`softmax_part` for blocks of queries (g, c, n, d) of which the i-th sees three blocks of `key` and `value`
    (l, c, d) from the i-th on: l = (g + 2)·block.

    >>> query, key, value = torch.randn(2, 1, 4, 8), torch.randn(16, 1, 8), torch.randn(16, 1, 8)
    >>> out, _ = window_part(query, key, value, torch.zeros(2, 1, 1, 12), scale=1.0, block=4)
    >>> last = torch.softmax(query[1, 0] @ key[4:, 0].T, dim=1) @ value[4:, 0]
    >>> torch.allclose(out[1, 0], last, atol=1e-6)
    True
    """
    return _BlockwisePart.apply(packed(query), packed(key), packed(value), bias, scale, block)


class _BlockwisePart(Function):
    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, block: int | None
    ) -> tuple[Tensor, Tensor]:
        seen = (_seen_by_blocks(x, query.shape[0], block) for x in (key, value))
        return part_forward(query, *seen, bias, scale)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.scale, ctx.block = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, logsumexp = ctx.saved_tensors
        number = query.shape[0]
        seen = (_seen_by_blocks(x, number, ctx.block) for x in (key, value))
        of_blocks = (grad, grad_logsumexp, query, *seen, bias, out, logsumexp)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=logsumexp.dtype) for x in (key, value))
        if torch.compiler.is_compiling():  # whose graph has no loop of a length that depends on the input's
            pieces = [slice(0, number)]
        else:
            pieces = [slice(first, first + BLOCKS_AT_ONCE) for first in range(0, number, BLOCKS_AT_ONCE)]
        for some in pieces:
            grad_query[some], *others = part_backward(*(x[some] for x in of_blocks), ctx.scale)
            for total, part in zip((grad_key, grad_value), others, strict=True):
                _add(part, total, some.start, ctx.block)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _seen_by_blocks(x: Tensor, number: int, block: int | None) -> Tensor:
    """What each of `number` blocks sees of keys or values, as views: (number, c, s, d)."""
    return x.expand(number, *x.shape) if block is None else x.unfold(0, 3 * block, block).transpose(2, 3)


def _add(grad: Tensor, total: Tensor, first: int, block: int | None) -> None:
    """Add the gradients (g, c, s, d) of what blocks from `first` on see to those of all keys or values."""
    if block is None:
        total += grad.sum(0, dtype=total.dtype)
        return
    for place, third in enumerate(grad.transpose(1, 2).unflatten(1, (3, block)).unbind(1), start=first):
        total[place * block : (place + grad.shape[0]) * block] += third.flatten(0, 1)  # (g·block c d)
