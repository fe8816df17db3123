"""Tensors that tests of attentions draw, and what they ask of every attention alike."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

EXTREMES = ("logits of ±1e4", "constant keys", "zeros", "one huge key", "tiny")
HALF_PRECISION_CASES = pytest.mark.parametrize(
    "dtype, n, m, spread",
    [
        (dtype, *sizes)
        for dtype in (torch.float16, torch.bfloat16)
        for sizes in ((512, 64, 1.0), (512, 16, 3.0), (300, 64, 2.0), (50, 64, 1.0))
    ],
    ids=str,
)
"""Tokens, landmarks, and how far queries and keys lie apart."""


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 1.0) -> Tensor:
    """The same numbers in every dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(spread).to(dtype)


def qkv(b=2, h=2, n=40, d=4, e=None, s=None, spread=1.0, dtype=torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (b, h, n, d) and keys (b, h, s, d) of some spread, values (b, h, s, e) of spread 1."""
    s, e = s or n, e or d
    return (
        draw(b, h, n, d, seed=1, spread=spread, dtype=dtype),
        draw(b, h, s, d, seed=2, spread=spread, dtype=dtype),
        draw(b, h, s, e, seed=3, dtype=dtype),
    )


def random_mask(b: int, n: int, seed: int = 0, share: float = 0.6) -> Tensor:
    return torch.rand(b, n, generator=torch.Generator().manual_seed(seed)) < share


def check_extreme_inputs(attend: Callable[..., Tensor], kind: str, dtype: torch.dtype, n: int) -> None:
    """Outputs and gradients are finite."""
    query, key, value = qkv(n=n, d=16)
    if kind == "logits of ±1e4":
        key = key * (1e4 / (query @ key.mT / 4).abs().max())
    elif kind == "constant keys":
        key = torch.ones_like(key)
    elif kind == "zeros":
        query, key, value = query * 0, key * 0, value * 0
    elif kind == "one huge key":
        key[:, :, 3] *= 100
    else:
        query, key = query * 1e-6, key * 1e-6
    tensors = [x.to(dtype).requires_grad_() for x in (query, key, value)]
    out = attend(*tensors)
    assert out.isfinite().all()
    out.float().square().mean().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)


def check_half_precision(attend: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Outputs and gradients are within 2 % of those in float32 for the same inputs, which are of `dtype`."""
    results = []
    for cast in (dtype, torch.float32):
        own = [x.to(cast).detach().requires_grad_() for x in inputs]
        out = attend(*own)
        results.append((out, *torch.autograd.grad(out, own, draw(*out.shape, seed=4, dtype=dtype).to(cast))))
    for half, full in zip(*results, strict=True):  # the output, then the gradients
        assert half.dtype == dtype
        assert (half.float() - full).norm() <= 0.02 * full.norm()


def check_same_with_gradients(ours: Tensor, expected: Tensor, inputs: Sequence[Tensor], atol: float) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=atol)
    weight = torch.randn_like(ours)
    gradients = [torch.autograd.grad(out, inputs, weight) for out in (ours, expected)]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=atol)
