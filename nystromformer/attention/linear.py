"""Linear attention: the softmax kernel replaced by phi(q) . phi(k) with phi = elu + 1 (Katharopoulos et al., 2020)."""

from torch import Tensor

from nystromformer.attention.base import Attention
from nystromformer.attention.shared.common import at_least_float32, check_self_attention, full_precision, zero_masked

SMALLEST_NORMALIZER = 1e-12
"""Only reached without valid keys, where the numerator is 0, or when every feature of a query underflows."""


def elu_plus_one(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1. Written without the `- 1 + 1` of elu, which would round exp(x) to 0 below x = -17.

    >>> import torch
    >>> elu_plus_one(torch.tensor([-20.0, 0.0, 2.0]))
    tensor([2.0612e-09, 1.0000e+00, 3.0000e+00])
    """
    return x.clamp(max=0).exp() + x.relu()


def linear_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """phi(Q) (phi(K)ᵀ V) / (phi(Q) Σ phi(K)) for self-attention on (b, h, n, d), `mask` (b, n) True for real tokens.

    >>> import torch
    >>> x = torch.randn(2, 4, 1000, 8)
    >>> linear_attention(x, x, x).shape
    torch.Size([2, 4, 1000, 8])
    """
    check_self_attention(query, key, value, mask)
    # sums over the whole sequence: half precision would lose all but the first few hundred tokens
    dtype = at_least_float32(value.dtype)
    with full_precision(value):
        q = elu_plus_one(zero_masked(query, mask).to(dtype))  # (b h n d)
        # phi(0) = 1, so padding has to be removed after the feature map
        k = zero_masked(elu_plus_one(zero_masked(key, mask).to(dtype)), mask)  # (b h n d)
        v = zero_masked(value, mask).to(dtype)
        context = k.mT @ v  # (b h d d)
        normalizer = q @ k.sum(dim=2).unsqueeze(-1)  # (b h n 1)
        out = (q @ context) / normalizer.clamp(min=SMALLEST_NORMALIZER)
    return zero_masked(out.to(value.dtype), mask)


class LinearAttention(Attention):
    name = "linear"
    operation = staticmethod(linear_attention)
