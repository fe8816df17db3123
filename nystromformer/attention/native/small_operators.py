"""What is small as operators of PyTorch: pseudoinverses, and the whole of Nyström attention around them.

They have no gradients of their own, like those of `thin_operators`.
"""

from typing import Any

import torch
from torch import Tensor

from nystromformer.attention.native.library import call
from nystromformer.attention.native.thin_operators import (
    columns,
    columns_backward,
    in_rows,
    new_rows,
    padded,
    register,
    rows,
    rows_backward,
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
    queries, keys, W, A, Z, steps = _small(query, value, num_landmarks, iterations, keep)
    for tokens, means in ((query, queries), (key, keys)):
        call("means_forward", query.dtype, 0.0, *_means_numbers(tokens, means))
    BV, lse = columns(queries, key, value, None, scale, None)
    small = queries, keys, BV, lse, W, A, Z, steps
    call("core_forward", query.dtype, scale, *_core_numbers(*small[:-1]), *_addresses(steps, iterations))
    out, _ = rows(query, keys, W, None, scale, False, None if kernel is None else value, kernel)
    return out, *small


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
    queries, keys, W, A, Z, steps = _small(query, value, num_landmarks, iterations, keep)
    out, BV = new_rows(query, value.shape[3]), new_rows(queries, value.shape[3])
    return out, queries, keys, BV, queries.new_empty(queries.shape[:3]), W, A, Z, steps


def _small(query: Tensor, value: Tensor, num_landmarks: int, iterations: int, keep: bool) -> tuple[Any, ...]:
    """Memory for landmarks of queries and keys, W, A, Z and the steps of the pseudoinverse."""
    side = padded(num_landmarks)
    small = lambda *shape: query.new_empty(*query.shape[:2], *shape)
    queries, keys = small(num_landmarks, query.shape[3]), small(num_landmarks, query.shape[3])
    steps = _steps(query, query.shape[0] * query.shape[1], side, iterations if keep else 0)
    return queries, keys, small(num_landmarks, value.shape[3]), small(side, side), small(side, side), steps


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
    dtype = query.dtype
    grad_query, grad_keys, grad_W = rows_backward(grad, None, query, keys, W, None, scale)
    grad_queries, grad_BV = torch.empty_like(queries), torch.empty_like(BV)
    of_core = (number for x in (grad_W, grad_BV, grad_queries, grad_keys) for number in view(x))
    numbers = (*_core_numbers(queries, keys, BV, lse, W, A, Z), *_addresses(steps, len(steps)))
    call("core_backward", dtype, scale, *numbers, *of_core)
    of_kernel = query.new_empty(0 if kernel is None else kernel.shape)
    skip = None if kernel is None else (grad, in_rows(kernel), of_kernel)
    of_BV, grad_key, grad_value = columns_backward(
        grad_BV, None, queries, key, value, None, BV, lse, scale, None, skip, grad_keys
    )
    grad_queries += of_BV
    call("means_backward", dtype, 0.0, *_means_numbers(grad_query, grad_queries))
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
