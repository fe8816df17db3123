"""Our dropout is PyTorch's by what can be told from its results."""

import pytest
import torch
from largest_tensor import saved_sizes

from nystromformer.attention.native import instructions
from nystromformer.models.encoder import Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_drops_the_asked_share_and_keeps_the_mean(p, dtype):
    torch.manual_seed(0)
    out = Dropout(p)(torch.ones(401, 2501, dtype=dtype))  # not divisible by 4
    assert out.dtype == dtype
    kept = out != 0
    deviation = (p * (1 - p) / out.numel()) ** 0.5
    assert kept.double().mean().item() == pytest.approx(1 - p, abs=5 * deviation)
    assert out[kept].double().unique().tolist() == [pytest.approx(1 / (1 - p), rel=5e-3)]


def test_decisions_of_neighbors_are_independent():
    torch.manual_seed(0)
    dropped = (Dropout(0.5)(torch.ones(1 << 20)) == 0).double() - 0.5
    for distance in (1, 2, 3, 4, 8):
        assert abs((dropped[distance:] * dropped[:-distance]).mean().item()) < 5 * 0.25 / 1024


def test_gradient_has_the_same_decisions():
    torch.manual_seed(0)
    x = torch.randn(7, 5, 3, requires_grad=True)
    out = Dropout(0.3)(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad * x, out)
    assert (x.grad == 0).any()


def test_gradients_of_gradients_have_the_same_decisions_too():
    x, upstream = (torch.randn(50, dtype=torch.float64, requires_grad=True) for _ in range(2))
    out = Dropout(0.4)(x)
    (grad,) = torch.autograd.grad(out, x, upstream, create_graph=True)
    (again,) = torch.autograd.grad(grad, upstream, torch.ones_like(grad))
    torch.testing.assert_close(again * upstream, grad)


@pytest.mark.skipif(instructions().startswith("none"), reason=instructions())
def test_nothing_is_kept_for_the_backward_and_threads_change_nothing():
    x = torch.randn(100_001, requires_grad=True)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        with saved_sizes() as saved:
            out = Dropout(0.3)(x)
        assert not saved
        found.append([out, *torch.autograd.grad(out, x, torch.ones_like(x))])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_is_determined_by_the_seed_and_absent_in_evaluation():
    x, dropout = torch.randn(100), Dropout(0.5)
    torch.manual_seed(1)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(1)
    assert torch.equal(dropout(x), first)
    assert not torch.equal(first, second)
    assert dropout.eval()(x) is x


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-9])
def test_none_and_all(p):
    x = torch.randn(100)
    assert torch.equal(Dropout(p)(x), x * (p < 1))


def test_compiled_it_drops_as_well():
    torch.manual_seed(0)
    out = torch.compile(Dropout(0.25), fullgraph=True, backend="aot_eager")(torch.ones(10_000))
    assert (out == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)
