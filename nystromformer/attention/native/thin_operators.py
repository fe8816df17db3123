"""Thin attention as operators of PyTorch, so that graphs can hold them. They have no gradients of their own.

Keys and values are (g, c, s, d) for each block of queries, (c, s, d) where all blocks share them, or (l, c, d) where
the i-th block sees three blocks of the sequence from the i-th on, as in `partial_softmax`. `bias` is (g, c, 1, s).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nystromformer.attention.native.library import call, large_pages

_operators = torch.library.Library("nystromformer", "DEF")
_NONE = (0, 0, 0, 0)
_PADDED = 32


def register(schema: str, function: Callable, of_shapes: Callable) -> None:
    """`of_shapes` gives tensors without content as a graph that is traced sees them."""
    name = _operators.define(schema)
    _operators.impl(name, function, "CPU")
    torch.library.register_fake(f"nystromformer::{name}", of_shapes, lib=_operators)


def in_rows(x: Tensor) -> Tensor:
    """`x` with each row in one piece."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def padded(*sizes: int) -> int:
    """The largest, up to a multiple of what whole vectors of every kind come to."""
    return (max(sizes) + _PADDED - 1) // _PADDED * _PADDED


def view(x: Tensor | None) -> tuple[int, ...]:
    """Where (g, c, r, width) begins, and its strides."""
    return _NONE if x is None else (x.data_ptr(), *x.stride()[:3])


def one_row(x: Tensor | None) -> tuple[int, ...]:
    """The same for (g, c, width)."""
    return _NONE if x is None else (x.data_ptr(), *x.stride()[:2], 0)


def new_rows(like: Tensor, width: int) -> Tensor:
    """Memory for (g, c, r, width), in the layout of projections, for `like` (g, c, r, ...)."""
    g, c, r = like.shape[:3]
    return large_pages(like.new_empty(g, r, c, width)).transpose(1, 2)


def _seen(x: Tensor, blocks: int, block: int | None) -> Tensor:
    """What each block of queries sees of keys or values, as views: (g, c, s, d)."""
    x = in_rows(x)
    if x.dim() == 4:
        return x
    if block is None:
        return x.expand(blocks, *x.shape)
    return x.unfold(0, 3 * block, block).transpose(2, 3)


def _inputs(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, block: int | None
) -> tuple[list[Tensor], list[int]]:
    """Tensors that must stay alive during a call, and the numbers that all calls begin with."""
    groups, heads = query.shape[:2]
    held = [in_rows(query), _seen(key, groups, block), _seen(value, groups, block)]
    bias = None if bias is None else in_rows(bias[:, :, 0].expand(groups, heads, held[1].shape[2]))
    sizes = (groups, heads, query.shape[2], held[1].shape[2], query.shape[3], held[2].shape[3])
    numbers = [*sizes, int(key.dim() == 3), *(number for x in held for number in view(x)), *one_row(bias)]
    return held + ([] if bias is None else [bias]), numbers


def rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """Attention to few keys."""
    held, numbers = _inputs(query, key, value, bias, None)
    out, lse = _rows_shapes(query, key, value, bias, scale, with_lse)
    call("rows_forward", query.dtype, scale, *numbers, *view(out), *one_row(lse if with_lse else None))
    del held
    return out, lse


def _rows_shapes(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor]:
    return new_rows(query, value.shape[-1]), query.new_empty(query.shape[:3] if with_lse else (0,))


def rows_backward(
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
    grad, grad_lse = in_rows(grad), None if grad_lse is None else in_rows(grad_lse)
    views = (x if x.dim() == 4 else x[None] for x in grads)
    places = (number for x in views for number in view(x))
    call("rows_backward", query.dtype, scale, *numbers, *view(grad), *one_row(grad_lse), *places)
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
    return new_gradients(query, key, value)


def new_gradients(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for those of queries, keys and values."""
    of_query, of_key, of_value = (new_rows(x, x.shape[3]) if x.dim() == 4 else x.new_empty(x.shape) for x in inputs)
    return of_query, of_key, of_value


def columns(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, block: int | None
) -> tuple[Tensor, Tensor]:
    """Attention of few queries."""
    held, numbers = _inputs(query, key, value, bias, block)
    out, lse = _columns_shapes(query, key, value, bias, scale, block)
    call("columns_forward", query.dtype, scale, *numbers, *view(out), *one_row(lse))
    del held
    return out, lse


def _columns_shapes(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, block: int | None
) -> tuple[Tensor, Tensor]:
    return new_rows(query, value.shape[-1]), query.new_empty(query.shape[:3])


def columns_backward(
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
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`into` are gradients of keys and values to be added to."""
    held, numbers = _inputs(query, key, value, bias, block)
    grads = _columns_backward_shapes(grad, grad_lse, query, key, value, bias, out, lse, scale, block)
    if into is not None:
        grads = (grads[0], *into)
    elif block is not None:  # what several blocks see gets a sum
        grads[1].zero_()
        grads[2].zero_()
    grad, out, lse = in_rows(grad), in_rows(out), in_rows(lse)
    grad_lse = None if grad_lse is None else in_rows(grad_lse)
    views = (grads[0], *(_seen(x, query.shape[0], block) for x in grads[1:]))
    places = (number for x in views for number in view(x))
    of_results = (*view(out), *one_row(lse), *view(grad), *one_row(grad_lse))
    adds = int(into is not None or block is not None)
    call("columns_backward", query.dtype, scale, *numbers, *of_results, *places, adds)
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
    return new_gradients(query, key, value)


_QKV = "Tensor query, Tensor key, Tensor value, Tensor? bias"
_TWO, _THREE = "(Tensor, Tensor)", "(Tensor, Tensor, Tensor)"
register(f"rows({_QKV}, float scale, bool with_lse) -> {_TWO}", rows, _rows_shapes)
register(
    f"rows_backward(Tensor grad, Tensor? grad_lse, {_QKV}, float scale) -> {_THREE}",
    rows_backward,
    _rows_backward_shapes,
)
register(f"columns({_QKV}, float scale, int? block) -> {_TWO}", columns, _columns_shapes)
register(
    f"columns_backward(Tensor grad, Tensor? grad_lse, {_QKV}, Tensor out, Tensor lse, float scale, int? block) "
    f"-> {_THREE}",
    columns_backward,
    _columns_backward_shapes,
)
