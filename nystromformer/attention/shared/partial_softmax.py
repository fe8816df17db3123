"""Softmax attention to a part of the keys, with its log-sum-exp, so that parts can be merged.

Keys of blocks are views: one set for all blocks, or windows that overlap. The gradient of what each block sees would be
as large as all views together. It is made for a few blocks at a time, and added to that of the keys themselves.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nystromformer.attention.native import MOST_COLUMNS, runs_native, thin_attention

MASKED = -1e30
"""The bias of a key that must not be seen. It is finite so that a softmax over such keys alone is no 0/0; the
log-sum-exp of that softmax is so low that its output gets the weight 0 when it is merged."""


FUSED_DEVICES = ("cpu",)
"""Where a fused kernel gives back the log-sum-exp. Elsewhere a matrix of queries by keys exists for a while."""


def attention_with_lse(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale·Q Kᵀ + bias) V, (g, c, n, d), and its log-sum-exp, (g, c, n), at least in float32.

    `query` is (g, c, n, d), `key` and `value` are (g, c, s, d), `bias` is (g, c, 1, s), at least in float32. Keys
    and values can be overlapping or repeated views. Both results have gradients; `bias` gets none.

    >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
    >>> out, logsumexp = attention_with_lse(query, key, value, torch.zeros(1, 2, 1, 5), scale=0.1)
    >>> torch.allclose(out, torch.softmax(0.1 * query @ key.mT, dim=-1) @ value, atol=1e-6)
    True
    """
    if min(query.shape[2], key.shape[2]) <= MOST_COLUMNS and runs_native(query, key, value, bias):
        return thin_attention(query, key, value, bias, scale)
    return _SoftmaxPart.apply(row_contiguous(query), row_contiguous(key), row_contiguous(value), bias, scale)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Attention to the keys of two parts in one softmax, from what `attention_with_lse` gave for each."""
    (out_1, logsumexp_1), (out_2, logsumexp_2) = first, second
    share = torch.sigmoid(logsumexp_1 - logsumexp_2).to(out_1.dtype).unsqueeze(-1)
    # Both outputs are kept for the backward; without one the result needs no memory of its own.
    return torch.lerp(out_2, out_1, share) if out_2.requires_grad else out_2.lerp_(out_1, share)


def merge_parts(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`merge`, and the log-sum-exp of both parts together."""
    return merge(first, second), torch.logaddexp(first[1], second[1])


class KeepsLogSumExp:
    """What custom functions keep for the backward: their tensors, the output and the log-sum-exp, never the weights."""

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)), *output)
        ctx.settings = [x for x in inputs if not isinstance(x, Tensor)]


class _SoftmaxPart(KeepsLogSumExp, Function):
    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return part_forward(query, key, value, bias, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        return *part_backward(grad, grad_logsumexp, *ctx.saved_tensors, *ctx.settings), None, None


def part_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`attention_with_lse` without gradients."""
    return (_fused if _has_fused(query) else _plain)(query, key, value, bias, scale)


def part_backward(
    grad: Tensor,
    grad_logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from those of the two results of `part_forward`, `out` and `logsumexp`."""
    # d logits = P ∘ (grad Vᵀ − D): for the output D = grad·out, less what comes through the log-sum-exp.
    wide = logsumexp.dtype
    D = torch.linalg.vecdot(grad.to(wide), out.to(wide)) - grad_logsumexp  # (g c n)
    kernel = _fused_backward if _has_fused(query) else _plain_backward
    return kernel(grad, query, key, value, bias, logsumexp, D.unsqueeze(-1), scale)


def row_contiguous(x: Tensor) -> Tensor:
    """`x` with each row in one piece, as the kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _has_fused(x: Tensor) -> bool:
    # An exported graph must also run elsewhere.
    return x.device.type in FUSED_DEVICES and not torch.compiler.is_exporting()


def _fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)


def _fused_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, logsumexp: Tensor, D: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel takes `out` only to form D = grad·out: in its place it gets the multiple of `grad` with our D."""
    grad = row_contiguous(grad)
    least = torch.finfo(grad.dtype).eps * D.abs()
    size = grad.abs().amax(-1, keepdim=True)
    # A vector of zeros has no multiple that gives D ≠ 0: so small a change is lost in rounding.
    grad = (grad + torch.where(size < least, least, 0)).to(query.dtype)
    size = torch.maximum(size, least).clamp(min=torch.finfo(D.dtype).tiny)
    unit = grad / size
    squares = torch.linalg.vecdot(unit, unit).clamp(min=0.5).unsqueeze(-1)  # at least 1, or 0 where all is 0
    stand_in = unit * (D / size / squares)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, stand_in.to(query.dtype), logsumexp, 0.0, False, attn_mask=bias, scale=scale
    )


def _plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    wide = bias.dtype  # logits in half precision would be off by more than small weights can bear
    logits = (scale * query.to(wide)) @ key.to(wide).mT + bias
    return (torch.softmax(logits, dim=-1) @ value.to(wide)).to(value.dtype), torch.logsumexp(logits, dim=-1)


def _plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, logsumexp: Tensor, D: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query.dtype
    grad, query, key, value = (x.to(bias.dtype) for x in (grad, query, key, value))
    P = torch.exp((scale * query) @ key.mT + bias - logsumexp.unsqueeze(-1))  # (g c n s)
    grad_logits = scale * P * (grad @ value.mT - D)
    return (grad_logits @ key).to(dtype), (grad_logits.mT @ query).to(dtype), (P.mT @ grad).to(dtype)


BLOCKS_AT_ONCE = 16
"""Enough for all cores, few enough that what they need stays in a cache."""


def few_at_once(number: int) -> list[slice]:
    """So many blocks, `BLOCKS_AT_ONCE` at a time.

    >>> few_at_once(20)
    [slice(0, 16, None), slice(16, 32, None)]
    """
    if torch.compiler.is_compiling():  # whose graph has no loop of a length that depends on the input's
        return [slice(0, number)]
    return [slice(first, first + BLOCKS_AT_ONCE) for first in range(0, number, BLOCKS_AT_ONCE)]


def shared_part(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`softmax_part` for blocks of queries (g, c, n, d) that all see the same `key` and `value` (c, s, d)."""
    if key.shape[1] <= MOST_COLUMNS and runs_native(query, key, value, bias):
        return thin_attention(query, key, value, bias, scale)
    return _BlockwisePart.apply(row_contiguous(query), row_contiguous(key), row_contiguous(value), bias, scale, None)


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
    if query.shape[2] <= MOST_COLUMNS and runs_native(query, key, value, bias):
        return thin_attention(query, key, value, bias, scale, block=block)
    return _BlockwisePart.apply(row_contiguous(query), row_contiguous(key), row_contiguous(value), bias, scale, block)


class _BlockwisePart(KeepsLogSumExp, Function):
    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float, block: int | None
    ) -> tuple[Tensor, Tensor]:
        key, value = (_seen_by_blocks(x, query.shape[0], block) for x in (key, value))
        return part_forward(query, key, value, bias, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, out, logsumexp = ctx.saved_tensors
        (scale, block), number = ctx.settings, query.shape[0]
        seen = (_seen_by_blocks(x, number, block) for x in (key, value))
        of_blocks = (grad, grad_logsumexp, query, *seen, bias, out, logsumexp)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(x, dtype=logsumexp.dtype) for x in (key, value))
        for some in few_at_once(number):
            g, g_lse, q, k, v, b, o, lse = (x[some] for x in of_blocks)
            grad_query[some], *others = part_backward(g, g_lse, q, k, v, b, o, lse, scale)
            for total, part in zip((grad_key, grad_value), others, strict=True):
                _add(part, total, some.start, block)
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
