"""The Moore–Penrose pseudoinverse: the paper's iteration, an exact one for studies, and a residual to judge both."""

import torch
from torch import Tensor

from nystromformer.attention.common import full_precision, shape_of
from nystromformer.checks import check_at_least, check_choice

SCALINGS = ("matrix", "batch")

PSEUDOINVERSES = ("iterative", "exact")


def iterative_pinv(A: Tensor, iterations: int = 6, scaling: str = "matrix") -> Tensor:
    """The paper's iteration (Lemma 1) for the pseudoinverse of each matrix of `A` (..., r, c): (..., c, r).

    Z₀ = Aᵀ / (‖A‖₁ ‖A‖∞);  Z ← ¼ Z (13 I − A Z (15 I − A Z (7 I − A Z))).

    Runs at least in float32, autocast or not: in half precision it diverges. `scaling="batch"` takes the norms over
    all matrices together, as published checkpoints were trained; a matrix's result then depends on its neighbours.
    Six steps leave singular values below about 3 % of the largest unresolved, which regularises: more steps are not
    safer, since rounding grows along those directions. `pinv_residual` tells how close the result is.

    >>> A = torch.softmax(torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)) * 4, dim=-1)
    >>> bool((pinv_residual(A, iterative_pinv(A, iterations=12)) < 1e-3).all())
    True
    """
    _check_matrices(A)
    check_at_least("iterations", iterations, 0, "the paper uses 6")
    check_choice("scaling", scaling, SCALINGS)
    with full_precision(A):
        A = A.to(torch.promote_types(A.dtype, torch.float32))
        one_norm, inf_norm = A.abs().sum(-2).amax(-1), A.abs().sum(-1).amax(-1)  # of each matrix
        norms = one_norm * inf_norm if scaling == "matrix" else one_norm.amax() * inf_norm.amax()
        batch = A.shape[:-2]
        # A zero matrix has pseudoinverse zero: any other divisor than 0 gives that, and finite gradients.
        norms = torch.where(norms > 0, norms, 1).expand(batch)[..., None, None]
        Z = (A.mT / norms).reshape(-1, A.shape[-1], A.shape[-2])
        A = A.reshape(-1, *A.shape[-2:])
        for _ in range(iterations):
            # Each step of Horner's scheme is one fused multiply-add of matrices, without an identity matrix:
            Y = A @ Z
            T = torch.baddbmm(Y, Y, Y, beta=7, alpha=-1)  # Y (7 I − Y)
            T = torch.baddbmm(Y, Y, T, beta=15, alpha=-1)  # Y (15 I − Y (7 I − Y))
            Z = torch.baddbmm(Z, Z, T, beta=13 / 4, alpha=-1 / 4)
        return Z.reshape(*batch, *Z.shape[-2:])


def exact_pinv(A: Tensor) -> Tensor:
    """The pseudoinverse of each matrix of `A` (..., r, c) by singular value decomposition, at least in float32.

    For studies. In attention it is slower than `iterative_pinv` and its unregularised small singular values amplify
    the error of the approximation.

    >>> exact_pinv(torch.tensor([[2.0, 0.0], [0.0, 0.0]]))
    tensor([[0.5000, 0.0000],
            [0.0000, 0.0000]])
    """
    _check_matrices(A)
    with full_precision(A):
        return torch.linalg.pinv(A.to(torch.promote_types(A.dtype, torch.float32)))


def pinv_residual(A: Tensor, Z: Tensor) -> Tensor:
    """‖A Z A − A‖ / ‖A‖ in the Frobenius norm, for each matrix of `A`: 0 for a pseudoinverse, about 1 for Z = 0.

    >>> A = torch.eye(3)
    >>> float(pinv_residual(A, exact_pinv(A)))
    0.0
    """
    _check_matrices(A)
    with full_precision(A):
        A = A.to(torch.promote_types(A.dtype, torch.float32))
        error = torch.linalg.matrix_norm(A @ Z.to(A.dtype) @ A - A)
        return error / torch.linalg.matrix_norm(A).clamp(min=torch.finfo(A.dtype).tiny)


def _check_matrices(A: Tensor) -> None:
    if not isinstance(A, Tensor) or A.dim() < 2 or not A.is_floating_point():
        given = f"shape {shape_of(A)} and dtype {A.dtype}" if isinstance(A, Tensor) else type(A).__name__
        raise ValueError(f"A has {given}: must be a floating-point tensor of matrices (..., rows, columns).")
