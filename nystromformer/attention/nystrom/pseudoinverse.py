"""The Moore–Penrose pseudoinverse: the paper's iteration, an exact one for studies, and a residual to judge both."""

import torch
from torch import Tensor
from torch.autograd import Function

from nystromformer.attention.native import MOST_COLUMNS, pinv, pinv_gradient, runs_native
from nystromformer.attention.shared.common import at_least_float32, full_precision, refuse_forward_mode, shape_of
from nystromformer.checks import check_at_least, check_choice

SCALINGS = ("matrix", "batch")

PSEUDOINVERSES = ("iterative", "exact")


def iterative_pinv(A: Tensor, iterations: int = 6, scaling: str = "matrix") -> Tensor:
    """The paper's iteration (Lemma 1) for the pseudoinverse of each matrix of `A` (..., r, c): (..., c, r).

    Z₀ = Aᵀ / (‖A‖₁ ‖A‖∞);  Z ← ¼ Z (13 I − A Z (15 I − A Z (7 I − A Z))).

    Runs at least in float32, autocast or not: in half precision it diverges. `scaling="batch"` takes the norms over
    all matrices together, as published checkpoints were trained; a matrix's result then depends on its neighbors.
    Six steps leave singular values below about 3 % of the largest unresolved, which regularises: more steps are not
    safer, since rounding grows along those directions. `pinv_residual` tells how close the result is.

    >>> A = torch.softmax(torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)) * 4, dim=-1)
    >>> bool((pinv_residual(A, iterative_pinv(A, iterations=12)) < 1e-3).all())
    True
    """
    _check_matrices(A)
    check_at_least("iterations", iterations, 0, "the paper uses 6")
    check_choice("scaling", scaling, SCALINGS)
    refuse_forward_mode(A)
    with full_precision(A):
        A = A.to(at_least_float32(A.dtype))
        matrices = A.reshape(-1, *A.shape[-2:])
        together = 1 if scaling == "matrix" else max(matrices.shape[0], 1)
        # A compiler makes a backward of its own from the plain steps.
        if torch.compiler.is_compiling():
            Z = _iterate(matrices, iterations, together)[0]
        else:
            needs_steps = matrices.requires_grad and torch.is_grad_enabled()
            Z = _IterativePinv.apply(matrices, iterations, together, needs_steps)[0]
        return Z.reshape(*A.shape[:-2], A.shape[-1], A.shape[-2])


def exact_pinv(A: Tensor) -> Tensor:
    """The pseudoinverse of each matrix of `A` (..., r, c) by singular value decomposition, at least in float32.

    For studies. In attention it is slower than `iterative_pinv` and its unregularised small singular values amplify
    the error of the approximation. A matrix that holds NaN or infinity gives NaN, and leaves the others as they are.

    >>> exact_pinv(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    tensor([[0.5000, 0.0000],
            [0.0000, 0.0000]])
    """
    _check_matrices(A)
    with full_precision(A):
        A = A.to(at_least_float32(A.dtype))
        # The decomposition raises an error for the whole batch where one matrix is not finite.
        finite = A.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
        Z = torch.linalg.pinv(torch.where(finite, A, 0))
        return torch.where(finite, Z, torch.nan)


def pinv_residual(A: Tensor, Z: Tensor) -> Tensor:
    """‖A Z A − A‖ / ‖A‖ in the Frobenius norm, for each matrix of `A`: 0 for a pseudoinverse, about 1 for Z = 0.

    >>> A = torch.eye(3)
    >>> float(pinv_residual(A, exact_pinv(A)))
    0.0
    """
    _check_matrices(A)
    with full_precision(A):
        A = A.to(at_least_float32(A.dtype))
        error = torch.linalg.matrix_norm(A @ Z.to(A.dtype) @ A - A)
        return error / torch.linalg.matrix_norm(A).clamp(min=torch.finfo(A.dtype).tiny)


def _check_matrices(A: Tensor) -> None:
    if not isinstance(A, Tensor) or A.dim() < 2 or not A.is_floating_point():
        given = f"shape {shape_of(A)} and dtype {A.dtype}" if isinstance(A, Tensor) else type(A).__name__
        raise ValueError(f"A has {given}: must be a floating-point tensor of matrices (..., rows, columns).")


def _norms(A: Tensor, together: int) -> tuple[Tensor, ...]:
    """What Aᵀ is divided by for each group of `together` matrices, and its two factors, the largest of their sums of
    columns and of rows, each followed by its place."""
    absolute = A.abs()
    # Of equal sums, such as the rows of a softmax matrix have, any will do.
    one_norm, column = absolute.sum(1).reshape(-1, together * A.shape[2]).max(dim=1)
    inf_norm, row = absolute.sum(2).reshape(-1, together * A.shape[1]).max(dim=1)
    norms = one_norm * inf_norm
    # A zero matrix has pseudoinverse zero: any other divisor than 0 gives that, and finite gradients.
    return norms.masked_fill(norms == 0, 1), one_norm, column, inf_norm, row


def _iterate(A: Tensor, iterations: int, together: int) -> tuple[Tensor, ...]:
    """The pseudoinverses (g, c, r) of `A` (g, r, c), then what their gradient needs: `_norms`, and Z, Y and T of each
    step. `together` successive matrices share the largest norms among them."""
    norms, *of_norms = _norms(A, together)
    Z = A.mT / _for_each(norms, together)[:, None, None]
    steps = []
    for _ in range(iterations):
        # Each step of Horner's scheme is one fused multiply-add of matrices, without an identity matrix:
        Y = torch.bmm(A, Z)
        T = torch.baddbmm(Y, Y, Y, beta=7, alpha=-1)  # Y (7 I − Y)
        T = torch.baddbmm(Y, Y, T, beta=15, alpha=-1)  # Y (15 I − Y (7 I − Y))
        steps += [Z, Y, T]
        Z = torch.baddbmm(Z, Z, T, beta=13 / 4, alpha=-1 / 4)
    return Z, norms, *of_norms, *steps


def _iterate_native(A: Tensor, iterations: int, together: int, needs_steps: bool) -> tuple[Tensor, ...]:
    """The same with one tensor for all steps, or without them."""
    norms, *of_norms = _norms(A, together)
    Z, steps = pinv(A, _for_each(norms, together), iterations, needs_steps)
    return Z, norms, *of_norms, *([steps] if needs_steps else [])


def _for_each(norms: Tensor, together: int) -> Tensor:
    """The norms of groups for each of their matrices, (g,)."""
    return norms if together == 1 else norms[:, None].expand(-1, together).flatten()


class _IterativePinv(Function):
    """`_iterate` with a backward of eight products for each step, a third of what autograd launches for the steps.

    A second derivative runs through the same backward, for which the steps are made again, with gradients.
    """

    @staticmethod
    def forward(A: Tensor, iterations: int, together: int, needs_steps: bool) -> tuple[Tensor, ...]:
        if max(A.shape[1:]) <= MOST_COLUMNS and runs_native(A):
            return _iterate_native(A, iterations, together, needs_steps)
        return _iterate(A, iterations, together)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        A, ctx.iterations, ctx.together, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # which would make zeros for each of them
        ctx.save_for_backward(A, *output[1:])

    @staticmethod
    def backward(ctx, grad: Tensor | None, *unused: None) -> tuple[Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        A, *kept = ctx.saved_tensors
        if torch.is_grad_enabled() or len(kept) == 5:  # without steps
            kept = list(_iterate(A, ctx.iterations, ctx.together))[1:]
        norms, *of_norms = kept[:5]
        steps = kept[5:]
        # Machine code keeps one tensor for all steps.
        gradient = pinv_gradient if len(steps) == 1 else _steps_gradient
        grad_A, dots = gradient(grad, A, _for_each(norms, ctx.together), *steps)
        return _with_norms(grad_A, dots, A, ctx.together, norms, *of_norms), None, None, None

    @staticmethod
    def vmap(info, in_dims: tuple, A: Tensor, *arguments: int) -> tuple[tuple, tuple]:
        A = A.movedim(in_dims[0], 0)
        outputs = _IterativePinv.apply(A.flatten(0, 1), *arguments)
        return tuple(x.unflatten(0, (A.shape[0], -1)) for x in outputs), (0,) * len(outputs)


def _steps_gradient(grad: Tensor, A: Tensor, norms: Tensor, *steps: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `A` from that of its pseudoinverse, as if `norms` (g,) had none, and Σ A ∘ that of the first Zᵀ,
    with what `_iterate` kept of its steps."""
    grad_A = torch.zeros_like(A)
    for last in range(len(steps), 0, -3):
        Z, Y, T = steps[last - 3 : last]
        grad_T = torch.baddbmm(Y, Z.mT, grad, beta=0, alpha=-1 / 4)
        # T = 15 Y − 7 Y² + Y³: with D = grad_T, grad_Y = 15 D − 7 (Yᵀ D + D Yᵀ) + YᵀYᵀ D + Yᵀ D Yᵀ + D YᵀYᵀ.
        left = torch.baddbmm(grad_T, Y.mT, grad_T, beta=-7)
        both = torch.baddbmm(left, grad_T, Y.mT)
        grad_Y = torch.baddbmm(grad_T, both, Y.mT, beta=15).baddbmm_(Y.mT, left)
        grad = torch.baddbmm(grad, grad, T.mT, beta=13 / 4, alpha=-1 / 4).baddbmm_(A.mT, grad_Y)
        grad_A = grad_A.baddbmm_(grad_Y, Z.mT)
    grad = grad.mT  # of Z₀ = Aᵀ / norms
    return grad_A + grad / norms[:, None, None], (grad * A).sum((1, 2))


def _with_norms(
    grad_A: Tensor,
    dots: Tensor,
    A: Tensor,
    together: int,
    norms: Tensor,
    one_norm: Tensor,
    column: Tensor,
    inf_norm: Tensor,
    row: Tensor,
) -> Tensor:
    """The whole gradient of `A`: norms are products of two sums of absolute values."""
    less = dots.reshape(-1, together).sum(1) / norms.square()
    of_columns = _at(column, less * inf_norm, together * A.shape[2]).reshape(-1, 1, A.shape[2])
    of_rows = _at(row, less * one_norm, together * A.shape[1]).reshape(-1, A.shape[1], 1)
    return torch.addcmul(grad_A, A.sign(), of_columns + of_rows, value=-1)


def _at(place: Tensor, x: Tensor, length: int) -> Tensor:
    """Rows of zeros, (g, length), with each of `x` (g,) at its `place` (g,)."""
    return x.new_zeros(x.shape[0], length).scatter(1, place[:, None], x[:, None])
