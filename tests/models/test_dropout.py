"""Our dropout is PyTorch's by what can be told from its results."""

import pytest
import torch

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
