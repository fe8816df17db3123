"""What the attentions call: thin attention, with few queries or few keys, with its gradients, and the pseudoinverse."""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nystromformer.attention.native import operators as operators

MOST_COLUMNS = 256
"""Queries or keys, whichever are fewer, up to which one side of the softmax fits into a cache."""

ops = torch.ops.nystromformer


def thin_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    *,
    block: int | None = None,
    with_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """softmax(scale·Q Kᵀ + bias) V and, where asked for, its log-sum-exp, as `partial_softmax.attention_with_lse`.

    `key` and `value` are (g, c, s, d), or as `operators` says: shared by all blocks, or in windows of three blocks of
    `block` tokens. `bias` is (g, c, 1, s), each of g and c possibly 1.
    """
    # Each softmax is made whole along the side that is shorter.
    few_keys = block is None and (key.dim() == 3 or key.shape[2] <= query.shape[2])
    if few_keys:
        return _FewKeys.apply(query, key, value, bias, scale, with_lse)
    return _FewQueries.apply(query, key, value, bias, scale, block)


class _FewKeys(Function):
    """Keeps its inputs alone for the backward, which makes every row of weights again."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, with_lse: bool
    ) -> tuple[Tensor, Tensor]:
        return ops.rows(query, key, value, bias, None, None, scale, with_lse)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.scale, ctx.with_lse = inputs
        ctx.set_materialize_grads(False)
        if not ctx.with_lse:
            ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_lse = grad_lse if ctx.with_lse else None  # a graph has zeros for what has no gradient
        if grad is None and grad_lse is None:
            return (None,) * 6
        query, key, value, bias = ctx.saved_tensors
        grad = query.new_zeros(*query.shape[:3], value.shape[-1]) if grad is None else grad
        return *ops.rows_backward(grad, grad_lse, query, key, value, bias, ctx.scale), None, None, None


class _FewQueries(Function):
    """Keeps the output and the log-sum-exp for the backward, which are small."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, block: int | None
    ) -> tuple[Tensor, Tensor]:
        return ops.columns(query, key, value, bias, scale, block)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.scale, ctx.block = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None and grad_lse is None:
            return (None,) * 6
        query, key, value, bias, out, lse = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        grads = ops.columns_backward(grad, grad_lse, query, key, value, bias, out, lse, ctx.scale, ctx.block)
        return *grads, None, None, None


def pinv(A: Tensor, norms: Tensor, iterations: int, keep: bool) -> tuple[Tensor, Tensor]:
    """The paper's iteration for `A` (g, r, c) from Aᵀ / `norms` (g,), and what `pinv_gradient` needs, where `keep`."""
    return ops.pinv(A, norms, iterations, keep)


def pinv_gradient(grad: Tensor, A: Tensor, norms: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `A` but for what comes through `norms`, and Σ A ∘ the gradient of the first Zᵀ."""
    return ops.pinv_backward(grad, A, norms, steps)
