"""The library's functions as operators of PyTorch, so that graphs can hold them. They have no gradients of their own.

Keys and values are (g, c, s, d) for each block of queries, (c, s, d) where all blocks share them, or (l, c, d) where
the i-th block sees three blocks of the sequence from the i-th on, as in `partial_softmax`. `bias` is (g, c, 1, s).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nystromformer.attention.native.library import call

_operators = torch.library.Library("nystromformer", "DEF")
_NONE = (0, 0, 0, 0)


def _register(schema: str, function: Callable, of_shapes: Callable) -> None:
    """`of_shapes` gives tensors without content as a graph that is traced sees them."""
    name = _operators.define(schema)
    _operators.impl(name, function, "CPU")
    torch.library.register_fake(f"nystromformer::{name}", of_shapes, lib=_operators)


def _in_rows(x: Tensor) -> Tensor:
    """`x` with each row in one piece."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _view(x: Tensor | None) -> tuple[int, ...]:
    """Where (g, c, r, width) begins, and its strides."""
    return _NONE if x is None else (x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


def _one_row(x: Tensor | None) -> tuple[int, ...]:
    """The same for (g, c, width)."""
    return _NONE if x is None else (x.data_ptr(), x.stride(0), x.stride(1), 0)


def _new(like: Tensor, g: int, c: int, r: int, width: int) -> Tensor:
    """Memory for (g, c, r, width), in the layout of projections."""
    return like.new_empty(g, r, c, width).transpose(1, 2)


def _seen(x: Tensor, blocks: int, block: int | None) -> Tensor:
    """What each block of queries sees of keys or values, as views: (g, c, s, d)."""
    x = _in_rows(x)
    if x.dim() == 4:
        return x
    return (
        x.expand(blocks, *x.shape)
        if block is None
        else x.as_strided(
            (blocks, x.shape[1], 3 * block, x.shape[2]), (block * x.stride(0), x.stride(1), x.stride(0), 1)
        )
    )


def _inputs(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, block: int | None
) -> tuple[list[Tensor], list[int]]:
    """Tensors that must stay alive during a call, and the numbers that all calls begin with."""
    groups, heads = query.shape[:2]
    held = [_in_rows(query), _seen(key, groups, block), _seen(value, groups, block)]
    bias = None if bias is None else _in_rows(bias[:, :, 0].expand(groups, heads, held[1].shape[2]))
    sizes = (groups, heads, query.shape[2], held[1].shape[2], query.shape[3], held[2].shape[3])
    numbers = [*sizes, int(key.dim() == 3), *(number for x in held for number in _view(x)), *_one_row(bias)]
    return held + ([] if bias is None else [bias]), numbers


def _rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    skip: Tensor | None,
    kernel: Tensor | None,
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    held, numbers = _inputs(query, key, value, bias, None)
    out, lse = _rows_shapes(query, key, value, bias, skip, kernel, scale, with_lse)
    skip, kernel = (None if x is None else _in_rows(x) for x in (skip, kernel))
    taps = (0, 0) if kernel is None else (kernel.data_ptr(), kernel.stride(0))
    of_convolution = (*_view(skip), taps[0], 0, taps[1], 0, 0 if kernel is None else kernel.shape[1])
    of_lse = _one_row(lse if with_lse else None)
    call("rows_forward", query.dtype, scale, *numbers, *_view(out), *of_lse, *of_convolution)
    del held
    return out, lse


def _rows_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    skip: Tensor | None,
    kernel: Tensor | None,
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    out = _new(query, *query.shape[:3], value.shape[-1])
    return out, query.new_empty(query.shape[:3] if with_lse else (0,))


def _rows_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    held, numbers = _inputs(query, key, value, bias, None)
    grads = _rows_backward_shapes(grad, grad_lse, query, key, value, bias, scale)
    grad, grad_lse = _in_rows(grad), None if grad_lse is None else _in_rows(grad_lse)
    views = (x if x.dim() == 4 else x[None] for x in grads)
    places = (number for x in views for number in _view(x))
    call("rows_backward", query.dtype, scale, *numbers, *_view(grad), *_one_row(grad_lse), *places)
    del held
    return grads


def _rows_backward_shapes(
    grad: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    new = lambda x: _new(x, *x.shape) if x.dim() == 4 else x.new_empty(x.shape)
    return new(query), new(key), new(value)


def _columns(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, block: int | None
) -> tuple[Tensor, Tensor]:
    held, numbers = _inputs(query, key, value, bias, block)
    out, lse = _columns_shapes(query, key, value, bias, scale, block)
    call("columns_forward", query.dtype, scale, *numbers, *_view(out), *_one_row(lse))
    del held
    return out, lse


def _columns_shapes(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, block: int | None
) -> tuple[Tensor, Tensor]:
    return _new(query, *query.shape[:3], value.shape[-1]), query.new_empty(query.shape[:3])


def _columns_backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    block: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    held, numbers = _inputs(query, key, value, bias, block)
    grads = _columns_backward_shapes(grad, grad_lse, query, key, value, bias, out, lse, scale, block)
    if block is not None:  # what several blocks see gets a sum
        grads[1].zero_()
        grads[2].zero_()
    grad, grad_lse, out, lse = (
        _in_rows(grad),
        None if grad_lse is None else _in_rows(grad_lse),
        _in_rows(out),
        _in_rows(lse),
    )
    views = (grads[0], *(_seen(x, query.shape[0], block) for x in grads[1:]))
    places = (number for x in views for number in _view(x))
    of_results = (*_view(out), *_one_row(lse), *_view(grad), *_one_row(grad_lse))
    call("columns_backward", query.dtype, scale, *numbers, *of_results, *places)
    del held
    return grads


def _columns_backward_shapes(
    grad: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    block: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _rows_backward_shapes(grad, grad_lse, query, key, value, bias, scale)


_PADDED = 32
"""Numbers that whole vectors of every kind come to: the sides of squares are multiples of it."""


def _pinv(A: Tensor, norms: Tensor, iterations: int, keep: bool) -> tuple[Tensor, Tensor]:
    """The pseudoinverses (g, c, r) of `A` (g, r, c) and, where `keep`, what the backward needs of each step."""
    A, norms = _in_rows(A), norms.contiguous()
    Z, steps = _pinv_shapes(A, norms, iterations, keep)
    numbers = _pinv_numbers(A, Z, norms, steps, iterations)
    call("pinv_forward", A.dtype, 0.0, *numbers)
    return Z, steps


def _pinv_numbers(A: Tensor, Z: Tensor, norms: Tensor, steps: Tensor, iterations: int) -> tuple[int, ...]:
    kept = steps.data_ptr() if steps.numel() else 0
    return (*A.shape, _side(A), iterations, *_view(A[None]), *_view(Z[None]), norms.data_ptr(), kept)


def _side(A: Tensor) -> int:
    return (max(A.shape[1:]) + _PADDED - 1) // _PADDED * _PADDED


def _pinv_shapes(A: Tensor, norms: Tensor, iterations: int, keep: bool) -> tuple[Tensor, Tensor]:
    side, kept = _side(A), iterations if keep else 0
    return A.new_empty(A.shape[0], A.shape[2], A.shape[1]), A.new_empty(A.shape[0], kept, 3, side, side)


def _pinv_backward(grad: Tensor, A: Tensor, norms: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `A` but for what comes through the norms, and Σ A ∘ that of the first step's Zᵀ, (g,)."""
    A, norms, grad = _in_rows(A), norms.contiguous(), _in_rows(grad)
    grad_A, dots = _pinv_backward_shapes(grad, A, norms, steps)
    numbers = _pinv_numbers(A, grad, norms, steps, steps.shape[1])
    call("pinv_backward", A.dtype, 0.0, *numbers, *_view(grad[None]), *_view(grad_A[None]), dots.data_ptr())
    return grad_A, dots


def _pinv_backward_shapes(grad: Tensor, A: Tensor, norms: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    return A.new_empty(A.shape), norms.new_empty(norms.shape)


_QKV = "Tensor query, Tensor key, Tensor value, Tensor? bias"
_TWO, _THREE = "(Tensor, Tensor)", "(Tensor, Tensor, Tensor)"
_register(f"rows({_QKV}, Tensor? skip, Tensor? kernel, float scale, bool with_lse) -> {_TWO}", _rows, _rows_shapes)
_register(
    f"rows_backward(Tensor grad, Tensor? grad_lse, {_QKV}, float scale) -> {_THREE}",
    _rows_backward,
    _rows_backward_shapes,
)
_register(f"columns({_QKV}, float scale, int? block) -> {_TWO}", _columns, _columns_shapes)
_register(
    f"columns_backward(Tensor grad, Tensor? grad_lse, {_QKV}, Tensor out, Tensor lse, float scale, int? block) "
    f"-> {_THREE}",
    _columns_backward,
    _columns_backward_shapes,
)
_register(f"pinv(Tensor A, Tensor norms, int iterations, bool keep) -> {_TWO}", _pinv, _pinv_shapes)
_register(
    f"pinv_backward(Tensor grad, Tensor A, Tensor norms, Tensor steps) -> {_TWO}", _pinv_backward, _pinv_backward_shapes
)
