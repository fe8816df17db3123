"""What is small as operators of PyTorch: pseudoinverses, and the whole of Nyström attention around them; dropout.

They have no gradients of their own, like those of `thin_operators`.
"""

from torch import Tensor

from nystromformer.attention.native.library import call, large_pages
from nystromformer.attention.native.thin_operators import in_rows, new_rows, one_row, padded, register, view


def _pinv(A: Tensor, norms: Tensor, iterations: int, keep: bool) -> tuple[Tensor, Tensor]:
    """The pseudoinverses (g, c, r) of `A` (g, r, c) and, where `keep`, what the backward needs of each step."""
    A, norms = in_rows(A), norms.contiguous()
    Z, steps = _pinv_shapes(A, norms, iterations, keep)
    call("pinv_forward", A.dtype, 0.0, *_pinv_numbers(A, Z, norms), iterations, steps.data_ptr() if keep else 0)
    return Z, steps


def _pinv_numbers(A: Tensor, Z: Tensor, norms: Tensor) -> tuple[int, ...]:
    return (*A.shape, padded(*A.shape[1:]), *view(A[None]), *view(Z[None]), norms.data_ptr())


def _pinv_shapes(A: Tensor, norms: Tensor, iterations: int, keep: bool) -> tuple[Tensor, Tensor]:
    side = padded(*A.shape[1:])
    steps = A.new_empty(A.shape[0] if keep else 0, iterations, 3, side, side)
    return A.new_empty(A.shape[0], A.shape[2], A.shape[1]), steps


def _pinv_backward(grad: Tensor, A: Tensor, norms: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `A` but for what comes through the norms, and Σ A ∘ that of the first step's Zᵀ, (g,)."""
    A, norms, grad = in_rows(A), norms.contiguous(), in_rows(grad)
    grad_A, dots = _pinv_backward_shapes(grad, A, norms, steps)
    numbers = (*_pinv_numbers(A, grad, norms), steps.shape[1], steps.data_ptr())
    call("pinv_backward", A.dtype, 0.0, *numbers, *view(grad[None]), *view(grad_A[None]), dots.data_ptr())
    return grad_A, dots


def _pinv_backward_shapes(grad: Tensor, A: Tensor, norms: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
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
    spans: Tensor | None,
    exact_up_to: int,
    num_landmarks: int,
    iterations: int,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Nyström attention with segment means for n, s > m, and all that is small: where `keep`, what the backward needs.

    With `spans` (g, 3), as `functions.whole_attention` gives them, a sequence has those rows of its example,
    or of packed tokens (t, h, d), that they tell. Rows of an example around its sequence are 0.

    Few tensors are made: in a call of a millisecond or two, each counts.
    """
    query, key, value = in_rows(query), in_rows(key), in_rows(value)
    kernel = None if kernel is None else in_rows(kernel)
    out, small = _nystrom_shapes(query, key, value, kernel, spans, exact_up_to, num_landmarks, iterations, scale, keep)
    sizes = exact_up_to, num_landmarks, iterations
    numbers = _nystrom_numbers(query, key, value, kernel, spans, small, *sizes, keep)
    call("nystrom_forward", query.dtype, scale, *numbers, *_view(out))
    return out, small


def _nystrom_numbers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    spans: Tensor | None,
    small: Tensor,
    exact_up_to: int,
    num_landmarks: int,
    iterations: int,
    keep: bool,
) -> tuple[int, ...]:
    groups = query.shape[0] if spans is None else spans.shape[0]
    lengths = (query.shape[2], key.shape[2]) if query.dim() == 4 else (0, 0)  # no example has rows around a sequence
    sizes = (groups, query.shape[1], *lengths, query.shape[-1], value.shape[-1])
    of_spans = 0 if spans is None else spans.data_ptr()
    of_kernel = (*_kernel(kernel), 0 if kernel is None else kernel.shape[1])
    of_small = (int(keep), small.shape[2], small.data_ptr())
    inputs = (*_view(query), *_view(key), *_view(value), *of_kernel)
    return (*sizes, num_landmarks, padded(num_landmarks), iterations, of_spans, exact_up_to, *inputs, *of_small)


def _view(x: Tensor) -> tuple[int, ...]:
    """Where (g, c, r, width), or packed (r, c, width), begins, and its strides."""
    return view(x) if x.dim() == 4 else (x.data_ptr(), 0, x.stride(1), x.stride(0))


def _new_rows(like: Tensor, width: int) -> Tensor:
    """Memory for (g, c, r, width), or packed (r, c, width)."""
    return new_rows(like, width) if like.dim() == 4 else large_pages(like.new_empty(*like.shape[:2], width))


def _kernel(kernel: Tensor | None) -> tuple[int, ...]:
    return one_row(None if kernel is None else kernel[None])


def _nystrom_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    spans: Tensor | None,
    exact_up_to: int,
    num_landmarks: int,
    iterations: int,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """The result, and memory for the parts that `whole_steps` in whole.h lists, for each sequence with landmarks."""
    m, side, e = num_landmarks, padded(num_landmarks), value.shape[-1]
    squares = 2 + (3 * iterations if keep else 0)
    numbers = padded(squares * side * side + 2 * m * (query.shape[-1] + e) + m)
    sequences = query.shape[0] if spans is None else int(spans[:, 2].max()) + 1
    return _new_rows(query, e), query.new_empty(sequences, query.shape[1], numbers)


def nystrom_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    spans: Tensor | None,
    small: Tensor,
    exact_up_to: int,
    num_landmarks: int,
    iterations: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and kernel, the last one empty where there is none."""
    grad, query, key, value = in_rows(grad), in_rows(query), in_rows(key), in_rows(value)
    kernel = None if kernel is None else in_rows(kernel)
    sizes = exact_up_to, num_landmarks, iterations
    grads = _nystrom_backward_shapes(grad, query, key, value, kernel, spans, small, *sizes, scale)
    numbers = _nystrom_numbers(query, key, value, kernel, spans, small, *sizes, True)
    of_kernel = _kernel(None if kernel is None else grads[3].zero_())
    places = (number for x in (grad, *grads[:3]) for number in _view(x))
    call("nystrom_backward", query.dtype, scale, *numbers, *places, *of_kernel, small.shape[0])
    return grads


def _nystrom_backward_shapes(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    spans: Tensor | None,
    small: Tensor,
    exact_up_to: int,
    num_landmarks: int,
    iterations: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_kernel = query.new_empty(0) if kernel is None else kernel.new_empty(kernel.shape)
    of_query, of_key, of_value = (_new_rows(x, x.shape[-1]) for x in (query, key, value))
    return of_query, of_key, of_value, of_kernel


def dropout(x: Tensor, dropped: int, seed: int) -> Tensor:
    """`x` with `dropped` of 65,536 numbers set to 0, which ones is decided by `seed`; the others grow, so that the mean
    stays."""
    x = x.contiguous()
    out = _dropout_shapes(x, dropped, seed)
    call("dropout", x.dtype, 0.0, x.numel(), dropped, seed, x.data_ptr(), out.data_ptr())
    return out


def _dropout_shapes(x: Tensor, dropped: int, seed: int) -> Tensor:
    return large_pages(x.new_empty(x.shape))


register("pinv(Tensor A, Tensor norms, int iterations, bool keep) -> (Tensor, Tensor)", _pinv, _pinv_shapes)
register(
    "pinv_backward(Tensor grad, Tensor A, Tensor norms, Tensor steps) -> (Tensor, Tensor)",
    _pinv_backward,
    _pinv_backward_shapes,
)
register("dropout(Tensor x, int dropped, int seed) -> Tensor", dropout, _dropout_shapes)
register("skip(Tensor value, Tensor kernel) -> Tensor", skip, _skip_shapes)
register("skip_kernel(Tensor grad, Tensor value, int taps) -> Tensor", skip_kernel, _skip_kernel_shapes)
_INPUTS = "Tensor query, Tensor key, Tensor value, Tensor? kernel, Tensor? spans"
_SIZES = "int exact_up_to, int num_landmarks, int iterations, float scale"
register(f"nystrom({_INPUTS}, {_SIZES}, bool keep) -> (Tensor, Tensor)", nystrom, _nystrom_shapes)
register(
    f"nystrom_backward(Tensor grad, {_INPUTS}, Tensor small, {_SIZES}) -> (Tensor, Tensor, Tensor, Tensor)",
    nystrom_backward,
    _nystrom_backward_shapes,
)
