"""What is small as operators of PyTorch: pseudoinverses, and the whole of Nyström attention around them.

They have no gradients of their own, like those of `thin_operators`.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nystromformer.attention.native.library import call
from nystromformer.attention.native.thin_operators import (
    QUERIES_ADD,
    columns_arguments,
    columns_backward_arguments,
    in_rows,
    new_rows,
    padded,
    register,
    rows_arguments,
    rows_backward_arguments,
    view,
)


def _pinv(A: Tensor, norms: Tensor, iterations: int, keep: bool) -> tuple[Tensor, list[Tensor]]:
    """The pseudoinverses (g, c, r) of `A` (g, r, c) and, where `keep`, what the backward needs of each step."""
    A, norms = in_rows(A), norms.contiguous()
    Z, steps = _pinv_shapes(A, norms, iterations, keep)
    call("pinv_forward", A.dtype, 0.0, *_pinv_numbers(A, Z, norms), *_addresses(steps, iterations))
    return Z, steps


def _pinv_numbers(A: Tensor, Z: Tensor, norms: Tensor) -> tuple[int, ...]:
    return (*A.shape, padded(*A.shape[1:]), *view(A[None]), *view(Z[None]), norms.data_ptr())


def _addresses(steps: list[Tensor], iterations: int) -> tuple[int, ...]:
    return (iterations, *([x.data_ptr() for x in steps] or [0] * iterations))


def _pinv_shapes(A: Tensor, norms: Tensor, iterations: int, keep: bool) -> tuple[Tensor, list[Tensor]]:
    steps = _steps(A, A.shape[0], padded(*A.shape[1:]), iterations if keep else 0)
    return A.new_empty(A.shape[0], A.shape[2], A.shape[1]), steps


def _steps(like: Tensor, count: int, side: int, number: int) -> list[Tensor]:
    return [like.new_empty(count, 3, side, side) for _ in range(number)]


def _pinv_backward(grad: Tensor, A: Tensor, norms: Tensor, steps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The gradient of `A` but for what comes through the norms, and Σ A ∘ that of the first step's Zᵀ, (g,)."""
    A, norms, grad = in_rows(A), norms.contiguous(), in_rows(grad)
    grad_A, dots = _pinv_backward_shapes(grad, A, norms, steps)
    numbers = (*_pinv_numbers(A, grad, norms), *_addresses(steps, len(steps)))
    call("pinv_backward", A.dtype, 0.0, *numbers, *view(grad[None]), *view(grad_A[None]), dots.data_ptr())
    return grad_A, dots


def _pinv_backward_shapes(grad: Tensor, A: Tensor, norms: Tensor, steps: list[Tensor]) -> tuple[Tensor, Tensor]:
    return A.new_empty(A.shape), norms.new_empty(norms.shape)


def skip(value: Tensor, kernel: Tensor) -> Tensor:
    """The convolution of `value` (b, h, n, e) with `kernel` (h, k)."""
    value, kernel = in_rows(value), in_rows(kernel)
    out = _skip_shapes(value, kernel)
    call("skip", value.dtype, 0.0, *_skip_numbers(value, kernel), *view(out))
    return out


def _skip_shapes(value: Tensor, kernel: Tensor) -> Tensor:
    return new_rows(value, value.shape[3])


def _skip_numbers(value: Tensor, kernel: Tensor) -> tuple[int, ...]:
    return (*value.shape, kernel.shape[1], *view(value), kernel.data_ptr(), 0, kernel.stride(0), 0)


def skip_kernel(grad: Tensor, value: Tensor, taps: int) -> Tensor:
    """The gradient (h, k) of the kernel."""
    grad, value = in_rows(grad), in_rows(value)
    grad_kernel = _skip_kernel_shapes(grad, value, taps)
    call("skip_kernel", value.dtype, 0.0, *_skip_numbers(value, grad_kernel), *view(grad))
    return grad_kernel


def _skip_kernel_shapes(grad: Tensor, value: Tensor, taps: int) -> Tensor:
    return value.new_empty(value.shape[1], taps)


def nystrom(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    num_landmarks: int,
    iterations: int,
    scale: float,
    keep: bool,
) -> tuple[Any, ...]:
    """Nyström attention with segment means for n, s > m, and all that is small, which the backward needs: landmarks of
    queries and keys, B V with its log-sum-exp, W, A and Z and, where `keep`, the steps of the pseudoinverse."""
    query, key, value = in_rows(query), in_rows(key), in_rows(value)
    kernel = None if kernel is None else in_rows(kernel)
    sizes = num_landmarks, iterations, scale, keep
    out, *small, steps = _nystrom_shapes(query, key, value, kernel, *sizes)
    queries, keys, BV, lse, W, _, _ = small
    skip = None if kernel is None else value
    _, of_columns = columns_arguments(queries, key, value, None, None, BV, lse)
    _, of_rows = rows_arguments(query, keys, W, None, out, None, skip, kernel)
    of_means = (_means_numbers(tokens, means) for tokens, means in ((query, queries), (key, keys)))
    of_core = (*_core_numbers(*small), *_addresses(steps, iterations))
    call("nystrom_forward", query.dtype, scale, *_together(*of_means, of_columns, of_core, of_rows))
    return out, *small, steps


def _together(*parts: Iterable[int]) -> Iterable[int]:
    """The numbers of several calls as those of one. Each begins with the number of threads; `call` gives the first."""
    first, *others = parts
    return chain(first, *((torch.get_num_threads(), *part) for part in others))


def _nystrom_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    num_landmarks: int,
    iterations: int,
    scale: float,
    keep: bool,
) -> tuple[Any, ...]:
    m, d, e, side = num_landmarks, query.shape[3], value.shape[3], padded(num_landmarks)
    small = lambda *shape: query.new_empty(*query.shape[:2], *shape)
    steps = _steps(query, query.shape[0] * query.shape[1], side, iterations if keep else 0)
    of_softmax = small(m, d), small(m, d), small(m, e), small(m)
    return new_rows(query, e), *of_softmax, small(m, e), small(side, side), small(side, side), steps


def _means_numbers(tokens: Tensor, means: Tensor) -> tuple[int, ...]:
    return (*tokens.shape[:3], *means.shape[2:], *view(tokens), *view(means))


def _core_numbers(
    queries: Tensor, keys: Tensor, BV: Tensor, lse: Tensor, W: Tensor, A: Tensor, Z: Tensor
) -> tuple[int, ...]:
    views = (number for x in (queries, keys, BV, W) for number in view(x))
    return (*queries.shape, BV.shape[3], A.shape[3], *views, A.data_ptr(), Z.data_ptr())


def nystrom_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    BV: Tensor,
    lse: Tensor,
    W: Tensor,
    A: Tensor,
    Z: Tensor,
    steps: list[Tensor],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and kernel, the last one empty where there is none."""
    grad, query, key, value = in_rows(grad), in_rows(query), in_rows(key), in_rows(value)
    kernel = None if kernel is None else in_rows(kernel)
    small = queries, keys, BV, lse, W, A, Z
    grad_query, grad_key, grad_value, of_kernel = _nystrom_backward_shapes(grad, query, key, value, kernel)
    grad_queries, grad_keys, grad_BV, grad_W = (torch.empty_like(x) for x in (queries, keys, BV, W))
    _, of_rows = rows_backward_arguments(grad, None, query, keys, W, None, (grad_query, grad_keys, grad_W))
    of_gradients = (number for x in (grad_W, grad_BV, grad_queries, grad_keys) for number in view(x))
    of_core = (*_core_numbers(*small), *_addresses(steps, len(steps)), *of_gradients)
    grads, skip = (grad_queries, grad_key, grad_value), None if kernel is None else (grad, kernel, of_kernel)
    inputs = grad_BV, None, queries, key, value, None, BV, lse, None
    _, of_columns = columns_backward_arguments(*inputs, grads, QUERIES_ADD, skip, grad_keys)
    parts = of_rows, of_core, of_columns, _means_numbers(grad_query, grad_queries)
    call("nystrom_backward", query.dtype, scale, *_together(*parts))
    return grad_query, grad_key, grad_value, of_kernel


def _nystrom_backward_shapes(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    *small: Tensor | list[Tensor] | float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_kernel = query.new_empty(0) if kernel is None else kernel.new_empty(kernel.shape)
    grad_query, grad_key, grad_value = (new_rows(x, x.shape[3]) for x in (query, key, value))
    return grad_query, grad_key, grad_value, of_kernel


register("pinv(Tensor A, Tensor norms, int iterations, bool keep) -> (Tensor, Tensor[])", _pinv, _pinv_shapes)
register(
    "pinv_backward(Tensor grad, Tensor A, Tensor norms, Tensor[] steps) -> (Tensor, Tensor)",
    _pinv_backward,
    _pinv_backward_shapes,
)
register("skip(Tensor value, Tensor kernel) -> Tensor", skip, _skip_shapes)
register("skip_kernel(Tensor grad, Tensor value, int taps) -> Tensor", skip_kernel, _skip_kernel_shapes)
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? kernel"
_SMALL = ("queries", "keys", "BV", "lse", "W", "A", "Z")
register(
    f"nystrom({_INPUTS}, int num_landmarks, int iterations, float scale, bool keep) -> "
    f"(Tensor, {', '.join('Tensor' for _ in _SMALL)}, Tensor[])",
    nystrom,
    _nystrom_shapes,
)
register(
    f"nystrom_backward(Tensor grad, {_INPUTS}, {', '.join(f'Tensor {name}' for name in _SMALL)}, Tensor[] steps, "
    f"float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    nystrom_backward,
    _nystrom_backward_shapes,
)
