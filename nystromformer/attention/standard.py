"""Standard softmax attention: exact, quadratic in time."""

from torch import Tensor
from torch.nn import functional

from nystromformer.attention.base import Attention
from nystromformer.attention.common import key_padding_mask, zero_masked
from nystromformer.checks import check_fraction


def standard_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """softmax(Q Kᵀ / √d) V for self-attention on (b, h, n, d), `mask` (b, n) True for real tokens.

    >>> import torch
    >>> x = torch.randn(2, 4, 10, 8)
    >>> standard_attention(x, x, x).shape
    torch.Size([2, 4, 10, 8])
    """
    query, key, value = (zero_masked(x, mask) for x in (query, key, value))
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=key_padding_mask(mask), dropout_p=dropout
    )
    return zero_masked(out, mask)


class StandardAttention(Attention):
    exact = True
    linear = False

    def __init__(self, num_heads: int, head_dim: int, max_length: int | None = None, *, dropout: float = 0.0) -> None:
        super().__init__(num_heads, head_dim, max_length)
        check_fraction("dropout", dropout)
        self.dropout = dropout

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return standard_attention(query, key, value, mask, dropout=self.dropout if self.training else 0.0)
