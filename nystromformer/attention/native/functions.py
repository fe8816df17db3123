"""What the attentions call, with gradients: Nyström attention as a whole, attention with few queries or few keys, the
parts of both, and those of Nyström attention with an exact near field.

Their functions take `ctx` in the forward: with a `setup_context` of its own PyTorch inspects a signature at each call,
and it serves transforms of `torch.func` alone, under which none of this runs.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from nystromformer.attention.native import (  # noqa: F401 (operators are made on import)
    exact_operators,
    small_operators,
    thin_operators,
)
from nystromformer.attention.native.local_operators import Core, fields_backward

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

    `key` and `value` are (g, c, s, d), or as `thin_operators` says: shared by all blocks, or in windows of three blocks
    of `block` tokens. `bias` is (g, c, 1, s), each of g and c possibly 1.
    """
    # Each softmax is made whole along the side that is shorter.
    few_keys = block is None and (key.dim() == 3 or key.shape[2] <= query.shape[2])
    if few_keys:
        return _FewKeys.apply(query, key, value, bias, scale, with_lse)
    return _FewQueries.apply(query, key, value, bias, scale, block)


def _keeping(ctx, operator: Callable[..., tuple[Tensor, Tensor]], *inputs: Any) -> tuple[Tensor, Tensor]:
    """The result of `operator` and its log-sum-exp, kept for the backward with the tensors among its inputs; the last
    two of these are none, and become `ctx.numbers`."""
    out, lse = operator(*inputs)
    ctx.numbers = inputs[-2:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:-2], out, lse)
    return out, lse


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """softmax(scale·Q Kᵀ) V, whose weights are dropped with probability `dropout`, without a matrix of them.

    With `spans` it is self-attention of each example (b, h, n, d) between where its tokens begin and end, zeros around.
    """
    own = None if spans is None else _span_table(spans, query.shape[2])
    dropped = dropped_levels(dropout)
    inputs = (query, key, value, own, scale, dropped, draw_seed() if dropped else 0)
    return _Exact.apply(*inputs) if wants_gradient(query, key, value) else ops.exact(*inputs)[0]


def wants_gradient(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


LEVELS = 1 << 16
"""Of which a share is dropped: probabilities are multiples of 1 / LEVELS."""


def dropped_levels(probability: float) -> int:
    return round(probability * LEVELS)


def draw_seed() -> int:
    """A number of 64 bits by PyTorch's generator, from which all decisions of a dropout follow."""
    return int(torch.empty((), dtype=torch.int64).random_(-(1 << 63), None))


class _Exact(Function):
    """Keeps the output and its log-sum-exp for the backward, never the weights."""

    @staticmethod
    def forward(ctx, *inputs: Any) -> Tensor:
        out, lse = ops.exact(*inputs)
        ctx.rule = inputs[4:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:4], out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        return *ops.exact_backward(grad, *ctx.saved_tensors, *ctx.rule), *(None,) * 4


class _FewKeys(Function):
    """Keeps its inputs alone for the backward, which makes every row of weights again."""

    @staticmethod
    def forward(ctx, *inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse = ops.rows(*inputs)
        *tensors, ctx.scale, ctx.with_lse = inputs
        ctx.set_materialize_grads(False)
        if not ctx.with_lse:
            ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(*tensors)
        return out, lse

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
    def forward(ctx, *inputs: Any) -> tuple[Tensor, Tensor]:
        return _keeping(ctx, ops.columns, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None and grad_lse is None:
            return (None,) * 6
        saved = ctx.saved_tensors
        grad = torch.zeros_like(saved[-2]) if grad is None else grad
        return *ops.columns_backward(grad, grad_lse, *saved, *ctx.numbers), None, None, None


def pinv(A: Tensor, norms: Tensor, iterations: int, keep: bool) -> tuple[Tensor, Tensor]:
    """The paper's iteration for `A` (g, r, c) from Aᵀ / `norms` (g,), and what `pinv_gradient` needs of its steps,
    (g, iterations, 3, ...), where `keep`."""
    return ops.pinv(A, norms, iterations, keep)


def pinv_gradient(grad: Tensor, A: Tensor, norms: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `A` but for what comes through `norms`, and Σ A ∘ the gradient of the first Zᵀ."""
    return ops.pinv_backward(grad, A, norms, steps)


def skip(value: Tensor, kernel: Tensor) -> Tensor:
    """The skip convolution of `value` (b, h, n, e) with `kernel` (h, k), without gradients."""
    return ops.skip(value, kernel)


def skip_kernel_gradient(grad: Tensor, value: Tensor, kernel_size: int) -> Tensor:
    """The gradient (h, k) of its kernel."""
    return ops.skip_kernel(grad, value, kernel_size)


def whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    num_landmarks: int,
    iterations: int,
    scale: float,
    spans: Sequence[tuple[int, int]] | None = None,
    exact_up_to: int = 0,
) -> Tensor:
    """Nyström attention with segment means, for more than m queries and keys, and the skip convolution of the values.

    With `spans`, where sequences of any lengths begin and end, it is self-attention of each of these alone, exact for
    at most `exact_up_to` tokens, m or more of them: the i-th in the rows of the i-th example (b, h, n, d), zeros around
    it, or all of them one after the other among packed tokens (t, h, d).

    As one function it writes each large gradient once, and keeps nothing large but its inputs.
    """
    inputs = (query, key, value) if kernel is None else (query, key, value, kernel)
    own = None if spans is None else _span_table(spans, exact_up_to)
    sizes = (exact_up_to, num_landmarks, iterations, scale)
    if wants_gradient(*inputs):
        return _Whole.apply(query, key, value, kernel, own, *sizes)
    return ops.nystrom(query, key, value, kernel, own, *sizes, False)[0]


def _span_table(spans: Sequence[tuple[int, int]], exact_up_to: int) -> Tensor:
    """(g, 3): the first row of each sequence, its length, and its number among those that have landmarks, or -1."""
    numbers = count()
    lengths = ((first, after - first) for first, after in spans)
    rows = [(first, length, next(numbers) if length > exact_up_to else -1) for first, length in lengths]
    return torch.tensor(rows, dtype=torch.int64)


class _Whole(Function):
    """Keeps its inputs and what is small."""

    @staticmethod
    def forward(ctx, *inputs: Any) -> Tensor:
        out, small = ops.nystrom(*inputs, True)
        ctx.sizes = inputs[5:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:5], small)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 9
        *grads, of_kernel = ops.nystrom_backward(grad, *ctx.saved_tensors, *ctx.sizes)
        return *grads, of_kernel if ctx.needs_input_grad[3] else None, *(None,) * 5


# With an exact near field


def column_sums(query: Tensor, lse: Tensor, key: Tensor, scale: float, places: int) -> Tensor:
    """Sums (c, places) of columns of softmax(scale·Q Kᵀ), whose rows have the log-sum-exps `lse` (c, r), for `query`
    (c, r, d) and `key` (l, c, d), without gradients; zeros for places from l on."""
    return ops.column_sums(query, lse, key, scale, places)


def moments(tokens: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Sums and sums of squares (c, blocks, d) over the blocks of `tokens` (l, c, d), without gradients."""
    return ops.moments(tokens, block)


def near_attention(
    query: Tensor,
    places: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    chosen: Tensor | None,
    block: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of single queries (c, r, d), from `places` (c, r), to the keys (l, c, d) of their blocks, of both
    neighbours, and of the blocks `chosen` (c, blocks, k) for them, and its log-sum-exp (c, r)."""
    return _Near.apply(query, places, key, value, bias, chosen, block, scale)


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    chosen: Tensor | None,
    far_key: Tensor,
    far_value: Tensor,
    far_bias: Tensor,
    block: int,
    scale: float,
) -> Tensor:
    """Attention (l, c, e) of all queries to the same keys and to far ones (c, m, d), which all blocks share."""
    return _Local.apply(query, key, value, bias, chosen, far_key, far_value, far_bias, block, scale)


def far_means(
    key: Tensor,
    value: Tensor,
    valid: Tensor,
    place: Tensor,
    real: Tensor,
    chosen: Tensor | None,
    segments: int,
    block: int,
    blocks: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The far field of `key` and `value` (l, c, d), as `nystrom_local.parts.far_field` gives it: keys and values
    (c, m, d), and the bias (blocks, c, m). `chosen` (c, blocks, k) is -1 where there is no such block."""
    return _Far.apply(key, value, valid, place, real, chosen, segments, block, blocks)


def ridge_values(
    exact: Tensor, near_out: Tensor, near_lse: Tensor, far_logits: Tensor, far_value: Tensor, ridge: float
) -> Tensor:
    """What `nystrom_local.parts.corrected_values` gives."""
    inputs = exact, near_out, near_lse, far_logits, far_value
    if wants_gradient(*inputs):
        return _Ridge.apply(*inputs, ridge)
    return ops.ridge(*inputs, ridge, False)[0]


def ridge_values_kept(*inputs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same without gradients, and what they need."""
    values, *kept = ops.ridge(*inputs, True)
    return values, tuple(kept)


def fields_attention(core: Core, *given: Any) -> Tensor:
    """`local_attention` of `given` without gradients but those of query, key and value, which get them through all that
    was made of them, as `core` tells it, too."""
    return _Fields.apply(*given, core)


class _Near(Function):
    @staticmethod
    def forward(ctx, *inputs: Any) -> tuple[Tensor, Tensor]:
        return _keeping(ctx, ops.near, *inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None and grad_lse is None:
            return (None,) * 8
        saved = ctx.saved_tensors
        grad = torch.zeros_like(saved[-2]) if grad is None else grad
        grad_query, grad_key, grad_value = ops.near_backward(grad, grad_lse, *saved, *ctx.numbers)
        return grad_query, None, grad_key, grad_value, *(None,) * 4


class _Local(Function):
    """Keeps the output and its log-sum-exp for the backward, never the weights."""

    @staticmethod
    def forward(ctx, *inputs: Any) -> Tensor:
        return _keeping(ctx, ops.local, *inputs)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 10
        grads = ops.local_backward(grad, *ctx.saved_tensors, *ctx.numbers)
        grad_query, grad_key, grad_value, grad_far_key, grad_far_value = grads
        return grad_query, grad_key, grad_value, None, None, grad_far_key, grad_far_value, None, None, None


class _Fields(Function):
    @staticmethod
    def forward(ctx, *inputs: Any) -> Tensor:
        *given, ctx.core = inputs
        return _keeping(ctx, ops.local, *given)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 11
        return *fields_backward(grad, ctx.core, *ctx.saved_tensors, *ctx.numbers), *(None,) * 8


class _Ridge(Function):
    """Keeps what is small: weights of the core rows, and the factor of the system that was solved."""

    @staticmethod
    def forward(ctx, *inputs: Any) -> Tensor:
        values, *kept = ops.ridge(*inputs, True)
        *tensors, ctx.ridge = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, values, *kept)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        return *ops.ridge_backward(grad, *ctx.saved_tensors, ctx.ridge), None


class _Far(Function):
    @staticmethod
    def forward(ctx, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        far_key, far_value, bias = ops.far(*inputs)
        key, _, valid, place, real, chosen, *ctx.sizes = inputs
        ctx.length = key.shape[0]
        ctx.mark_non_differentiable(bias)
        ctx.save_for_backward(valid, place, real, chosen)
        return far_key, far_value, bias

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_key: Tensor, grad_value: Tensor, unused: Tensor) -> tuple[Tensor | None, ...]:
        grads = ops.far_backward(grad_key, grad_value, ctx.length, *ctx.saved_tensors, *ctx.sizes)
        return *grads, *(None,) * 7
