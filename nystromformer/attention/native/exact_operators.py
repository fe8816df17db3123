"""Exact attention to many keys as operators of PyTorch, which graphs can hold. They have no gradients of their own.

Queries, keys and values are (g, c, n, d), (g, c, s, d) and (g, c, s, e). `spans` (g, 3) tells where sequences of
self-attention begin, and their lengths; `dropped` of 65,536 weights are, which ones is decided by `seed`.
"""

from typing import Any

from torch import Tensor

from nystromformer.attention.native.library import call
from nystromformer.attention.native.thin_operators import in_rows, new_gradients, new_rows, register, view


def _numbers(inputs: tuple[Tensor, Tensor, Tensor], spans: Tensor | None, *rest: int) -> list[int]:
    """What both calls begin with."""
    query, key, value = inputs
    sizes = (*query.shape[:3], key.shape[2], query.shape[3], value.shape[3])
    places = (number for x in inputs for number in view(x))
    return [*sizes, *places, 0 if spans is None else spans.data_ptr(), *rest]


def _zeros_around(x: Tensor, spans: Tensor | None) -> Tensor:
    """`x`, new memory, with zeros where only a part of it is to be written."""
    return x if spans is None else x.zero_()


def exact(
    query: Tensor, key: Tensor, value: Tensor, spans: Tensor | None, scale: float, dropped: int, seed: int
) -> tuple[Tensor, Tensor]:
    """The result, and the log-sum-exps of its rows."""
    inputs = in_rows(query), in_rows(key), in_rows(value)
    out, lse = _exact_shapes(query, key, value, spans)
    call(
        "exact_forward", query.dtype, scale, *_numbers(inputs, spans, dropped, seed), *view(out), *view(lse[..., None])
    )
    return out, lse


def _exact_shapes(query: Tensor, key: Tensor, value: Tensor, spans: Tensor | None, *rule: Any) -> tuple[Tensor, Tensor]:
    return _zeros_around(new_rows(query, value.shape[3]), spans), query.new_empty(query.shape[:3])


def exact_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dropped: int,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = in_rows(query), in_rows(key), in_rows(value)
    grads = _exact_backward_shapes(grad, query, key, value, spans)
    grad, out = in_rows(grad), in_rows(out)
    places = (number for x in (out, lse[..., None], grad, *grads) for number in view(x))
    call("exact_backward", query.dtype, scale, *_numbers(inputs, spans, dropped, seed), *places)
    return grads


def _exact_backward_shapes(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, spans: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (_zeros_around(x, spans) for x in new_gradients(query, key, value))
    return of_query, of_key, of_value


_QKV = "Tensor query, Tensor key, Tensor value, Tensor? spans"
_RULE = "float scale, int dropped, int seed"
register(f"exact({_QKV}, {_RULE}) -> (Tensor, Tensor)", exact, _exact_shapes)
register(
    f"exact_backward(Tensor grad, {_QKV}, Tensor out, Tensor lse, {_RULE}) -> (Tensor, Tensor, Tensor)",
    exact_backward,
    _exact_backward_shapes,
)
