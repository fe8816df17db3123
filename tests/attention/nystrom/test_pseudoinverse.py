import itertools
import math

import oracles
import pytest
import torch

from nystromformer.attention import exact_pinv, iterative_pinv, pinv_residual
from nystromformer.attention.native import without_native
from nystromformer.attention.nystrom import pseudoinverse
from nystromformer.bench.measure import Kernels


def softmax_matrices(*shape, spread=2.0, seed=0, dtype=torch.float64):
    logits = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.softmax(spread * logits, dim=-1).to(dtype)


@pytest.mark.parametrize("iterations", [0, 1, 6, 12])
def test_equals_the_papers_iteration_for_each_matrix(iterations):
    A = softmax_matrices(2, 3, 8, 8)
    Z = iterative_pinv(A, iterations)
    for b in range(2):
        for h in range(3):
            torch.testing.assert_close(Z[b, h], oracles.newton_pinv(A[b, h], iterations))


def test_converges_in_the_third_order():
    """Lemma 1: ‖I − A Z‖ is cubed by each step, once small. The order is measured from successive errors."""
    A = torch.eye(16, dtype=torch.float64) + 0.3 * softmax_matrices(16, 16)
    eye = torch.eye(16, dtype=torch.float64)
    errors = [torch.linalg.matrix_norm(eye - A @ iterative_pinv(A, i), ord=2).item() for i in range(1, 12)]
    small = [e for e in errors if 1e-13 < e < 0.5]
    orders = [math.log(after) / math.log(before) for before, after in itertools.pairwise(small)]
    assert len(orders) >= 2
    # ‖E'‖ = ‖E³ (3 + E)‖ / 4, so that log‖E'‖ / log‖E‖ comes down to 3 from above.
    assert orders[-1] == pytest.approx(3, abs=0.15)
    assert all(order > 2.9 for order in orders)


def test_converges_to_the_exact_pseudoinverse_also_of_singular_and_rectangular_matrices():
    generator = torch.Generator().manual_seed(0)
    singular = (
        torch.randn(5, 3, generator=generator, dtype=torch.float64) @ torch.randn(3, 7, generator=generator).double()
    )
    # Small singular values grow by 13/4 a step until the third order sets in; so does rounding where they are 0.
    torch.testing.assert_close(iterative_pinv(singular, 14), exact_pinv(singular), rtol=1e-6, atol=1e-6)


def test_a_zero_matrix_has_pseudoinverse_zero_and_finite_gradients():
    A = torch.zeros(2, 4, 4, requires_grad=True)
    Z = iterative_pinv(A)
    assert (Z == 0).all()
    Z.sum().backward()
    assert A.grad.isfinite().all()


def test_a_matrix_does_not_depend_on_its_neighbors_unless_asked():
    A = torch.cat([softmax_matrices(1, 8, 8, spread=5), softmax_matrices(3, 8, 8, spread=0.5)])
    torch.testing.assert_close(iterative_pinv(A), torch.cat([iterative_pinv(a[None]) for a in A]))
    alone = torch.cat([iterative_pinv(a[None], scaling="batch") for a in A])
    assert (iterative_pinv(A, scaling="batch") - alone).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_and_autocast_compute_in_float32(dtype):
    A = softmax_matrices(4, 32, 32, dtype=dtype)
    expected = iterative_pinv(A.float())
    assert expected.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(iterative_pinv(A), expected)
        torch.testing.assert_close(iterative_pinv(A.float()), expected)
        assert exact_pinv(A).dtype == pinv_residual(A, expected).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("spread", [0.1, 1, 10, 1e4])
def test_six_steps_stay_finite(spread, dtype):
    assert iterative_pinv(softmax_matrices(4, 64, 64, spread=spread, dtype=dtype)).isfinite().all()


def test_residual_is_the_relative_frobenius_error_of_each_matrix():
    A = softmax_matrices(3, 8, 8)
    Z = iterative_pinv(A)
    expected = [((A[i] @ Z[i] @ A[i] - A[i]).norm() / A[i].norm()).item() for i in range(3)]
    assert pinv_residual(A, Z).tolist() == pytest.approx(expected)
    assert pinv_residual(A, exact_pinv(A)).max() < 1e-12
    assert pinv_residual(A, torch.zeros_like(A)).tolist() == pytest.approx([1, 1, 1])
    assert (pinv_residual(torch.zeros(2, 2), torch.zeros(2, 2)) == 0).all()


def test_gradients_are_right():
    # A norm is a maximum, which has a derivative only where one sum is the largest. The rows of a softmax matrix all
    # sum to 1, so each row of each matrix gets a sum of its own; with scaling by the batch, matrices compete as well.
    A = softmax_matrices(2, 5, 5) * torch.linspace(0.5, 1, 10, dtype=torch.float64).view(2, 5, 1)
    for sums in (A.sum(-1), A.sum(-2)):
        gaps = [sums.sort(-1).values.diff().min(), sums.flatten().sort().values.diff().min()]
        assert min(gaps) > 1e-3, "far more than the 1e-6 by which the numerical derivative moves an element"
    A.requires_grad_()
    assert torch.autograd.gradcheck(iterative_pinv, A)
    assert torch.autograd.gradgradcheck(lambda A: iterative_pinv(A, 2), A)
    assert torch.autograd.gradcheck(lambda A: iterative_pinv(A, 3, "batch"), A)


def test_the_backward_launches_eight_products_for_each_step():
    A = softmax_matrices(3, 8, 8).requires_grad_()
    counts = {}
    for iterations in (2, 6):
        with without_native(), Kernels() as kernels:
            Z = iterative_pinv(A, iterations)
        forward = kernels.count
        with without_native(), Kernels() as kernels:
            torch.autograd.grad(Z, A, Z)
        counts[iterations] = forward, kernels.count
    assert counts[6][0] - counts[2][0] == 4 * 4
    assert counts[6][1] - counts[2][1] == 4 * 8
    assert counts[6][0] <= 34
    assert counts[6][1] <= 66


@pytest.mark.parametrize("scaling", ["matrix", "batch"])
def test_gradients_equal_those_of_autograd_through_the_plain_steps(scaling):
    A = softmax_matrices(2, 3, 8, 8).requires_grad_()
    upstream = softmax_matrices(2, 3, 8, 8, seed=1)
    plain = pseudoinverse._iterate(A.flatten(0, 1), 6, 1 if scaling == "matrix" else 6)[0].view_as(A)
    ours = iterative_pinv(A, 6, scaling)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(*(torch.autograd.grad(Z, A, upstream) for Z in (ours, plain)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("scaling", ["matrix", "batch"])
def test_vmap_and_gradients_inside_it_equal_a_loop(scaling):
    A = softmax_matrices(3, 2, 5, 5)
    run = lambda a: iterative_pinv(a, 4, scaling)
    gradient = torch.func.grad(lambda a: run(a).square().sum())
    for function in (run, gradient):
        looped = torch.stack([function(a) for a in A])
        torch.testing.assert_close(torch.func.vmap(function)(A), looped)
        torch.testing.assert_close(torch.func.vmap(function, in_dims=1)(A.transpose(0, 1)), looped)


@pytest.mark.parametrize("scaling", ["matrix", "batch"])
def test_no_matrix_has_no_pseudoinverse(scaling):
    A = torch.empty(0, 4, 3, requires_grad=True)
    Z = iterative_pinv(A, scaling=scaling)
    assert Z.shape == (0, 3, 4)
    Z.sum().backward()
    assert A.grad.shape == A.shape


def test_bad_arguments_are_refused():
    A = torch.eye(3)
    with pytest.raises(ValueError, match="iterations=-1: must be at least 0"):
        iterative_pinv(A, -1)
    with pytest.raises(ValueError, match="scaling='rows': must be one of 'matrix', 'batch'"):
        iterative_pinv(A, scaling="rows")
    for function in (iterative_pinv, exact_pinv, lambda A: pinv_residual(A, A)):
        with pytest.raises(ValueError, match=r"A has shape \(3\) and dtype torch.float32: must be"):
            function(torch.ones(3))
        with pytest.raises(ValueError, match="dtype torch.int64"):
            function(torch.ones(3, 3, dtype=torch.long))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_an_exact_pseudoinverse_keeps_what_is_not_finite_to_its_matrix(broken):
    A = softmax_matrices(3, 6, 6).detach()
    A[1, 2, 3] = broken
    A.requires_grad_()
    Z = exact_pinv(A)
    torch.testing.assert_close(Z[[0, 2]], torch.linalg.pinv(A[[0, 2]]))
    assert Z[1].isnan().all()
    (gradient,) = torch.autograd.grad(Z[[0, 2]].sum(), A)
    assert gradient.isfinite().all()
