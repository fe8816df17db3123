"""The names of the `nystrom-attention` package: change one import and keep trained weights.

    from nystromformer.integrations.nystrom_attention import NystromAttention, Nystromformer

Same arguments, calls and state-dict keys. What differs: an example's output depends neither on its batch nor on its
padding, any length works without tokens being added, short input is exact, and attention maps need no n×n matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from nystromformer.attention import SkipConvolution, nystrom_attention, nystrom_attention_weights
from nystromformer.attention.common import check_mask, full_precision, key_padding_mask, shape_of, zero_masked
from nystromformer.attention.nystrom import NystromOptions, landmark_core, masked_softmax
from nystromformer.checks import check_at_least, check_fraction, check_odd

LONGEST_MATRIX = 4096
"""Sequences for which the whole attention matrix is given: 8 heads of 4,096² float32 are 537 MB an example."""


class NystromAttention(nn.Module):
    """`nystrom_attention.NystromAttention`, on (b, n, dim).

    Args:
        dim, dim_head, heads: sizes.
        num_landmarks: m; exact for examples with at most m valid tokens.
        pinv_iterations: steps of the pseudoinverse.
        residual, residual_conv_kernel: the convolution of the values, and its odd kernel size.
        eps: accepted and not used; means divide by the number of valid tokens, which is never 0.
        dropout: on the output.
        pinv_scaling: "matrix", or "batch" for the package's own, where outputs depend on the batch.

    >>> attention = NystromAttention(dim=64, dim_head=16, heads=4, num_landmarks=32)
    >>> x = torch.randn(1, 5000, 64)
    >>> out, rows = attention(x, return_attn=[0])  # how the first token looks at all others
    >>> out.shape, rows.shape
    (torch.Size([1, 5000, 64]), torch.Size([1, 4, 1, 5000]))
    """

    def __init__(
        self,
        dim: int,
        dim_head: int = 64,
        heads: int = 8,
        num_landmarks: int = 256,
        pinv_iterations: int = 6,
        residual: bool = True,
        residual_conv_kernel: int = 33,
        eps: float = 1e-8,
        dropout: float = 0.0,
        *,
        pinv_scaling: str = "matrix",
    ) -> None:
        super().__init__()
        check_at_least("dim", dim, 1)
        check_at_least("dim_head", dim_head, 1)
        check_at_least("heads", heads, 1)
        check_fraction("dropout", dropout)
        self.options = NystromOptions(
            num_landmarks=num_landmarks, pinv_iterations=pinv_iterations, pinv_scaling=pinv_scaling
        )
        self.dim, self.heads, self.dim_head, self.residual, self.eps = dim, heads, dim_head, residual, eps
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(dropout))
        if residual:
            check_odd("residual_conv_kernel", residual_conv_kernel)
            self.res_conv = SkipConvolution(heads, residual_conv_kernel)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        return_attn: bool | Sequence[int] | Tensor = False,
        return_attn_matrices: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Attend within `x` (b, n, dim): (b, n, dim). `mask` (b, n) is True for real tokens.

        Args:
            return_attn: rows such as [0] to also get them, (b, h, len(rows), n), in O(n·m); True for the whole matrix
                (b, h, n, n) of short input.
            return_attn_matrices: also get the three factors of the matrix, (b, h, n, m), (b, h, m, m), (b, h, m, n).
        """
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x has shape {shape_of(x)}: must be (batch, length, {self.dim}).")
        check_mask("mask", mask, x)
        query, key, value = (
            y.unflatten(2, (self.heads, self.dim_head)).transpose(1, 2) for y in self.to_qkv(x).chunk(3, dim=2)
        )  # (b h n d)
        kernel = self.res_conv.weight if self.residual else None
        out = nystrom_attention(query, key, value, mask, conv_weight=kernel, **vars(self.options))
        out = self.to_out(out.transpose(1, 2).flatten(2))
        if return_attn_matrices:
            return out, attention_factors(query, key, mask, self.options)
        if return_attn is False:
            return out
        rows = all_rows(x.shape[1]) if return_attn is True else return_attn
        return out, nystrom_attention_weights(query, key, rows, mask, **vars(self.options))


class Nystromformer(nn.Module):
    """`nystrom_attention.Nystromformer`: pre-norm layers of attention and feed-forward on (b, n, dim).

    >>> model = Nystromformer(dim=32, depth=2, dim_head=8, heads=4, num_landmarks=16)
    >>> model(torch.randn(2, 100, 32), mask=torch.arange(100) < torch.tensor([[100], [70]])).shape
    torch.Size([2, 100, 32])
    """

    def __init__(
        self,
        *,
        dim: int,
        depth: int,
        dim_head: int = 64,
        heads: int = 8,
        num_landmarks: int = 256,
        pinv_iterations: int = 6,
        attn_values_residual: bool = True,
        attn_values_residual_conv_kernel: int = 33,
        attn_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        pinv_scaling: str = "matrix",
    ) -> None:
        super().__init__()
        check_at_least("depth", depth, 1)
        check_fraction("ff_dropout", ff_dropout)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            attention = NystromAttention(
                dim,
                dim_head=dim_head,
                heads=heads,
                num_landmarks=num_landmarks,
                pinv_iterations=pinv_iterations,
                residual=attn_values_residual,
                residual_conv_kernel=attn_values_residual_conv_kernel,
                dropout=attn_dropout,
                pinv_scaling=pinv_scaling,
            )
            self.layers.append(nn.ModuleList([PreNorm(dim, attention), PreNorm(dim, FeedForward(dim, ff_dropout))]))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for attention, feed_forward in self.layers:
            x = x + attention(x, mask=mask)
            x = x + feed_forward(x)
        return x


class PreNorm(nn.Module):
    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x: Tensor, **options: Tensor | None) -> Tensor:
        return self.fn(self.norm(x), **options)


class FeedForward(nn.Module):
    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def attention_factors(
    query: Tensor, key: Tensor, mask: Tensor | None, options: NystromOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """F (b, h, n, m), Z (b, h, m, m) and B (b, h, m, n) whose product is the attention matrix, in O(n·m).

    Where an example has at most m valid tokens F holds its exact weights; Z is then the identity, and B puts each
    weight to its token. With n < m there are n landmarks.
    """
    length, width = query.shape[2:]
    scale, m, wide = width**-0.5, min(options.num_landmarks, length), torch.promote_types(query.dtype, torch.float32)
    options = NystromOptions(**vars(options) | {"num_landmarks": m})
    with full_precision(query):
        dtype = query.dtype
        query, key = zero_masked(query, mask).to(wide), zero_masked(key, mask).to(wide)
        core = landmark_core(query, key, mask, mask, scale, options)
        F = masked_softmax(scale * query @ core.keys.mT, core.attendable_keys)
        B = masked_softmax(scale * core.queries @ key.mT, key_padding_mask(mask))
        few = core.key_segments.one_token_each[:, None, None, None]
        own_place = functional.one_hot(core.key_segments.index, m).mT[:, None].to(wide)  # (b 1 m n)
        Z = torch.where(few, torch.eye(m, dtype=wide, device=query.device), core.inverse)
        B = torch.where(few, own_place, B)
        if mask is not None:
            B = B.masked_fill(~mask[:, None, None, :], 0)
        return zero_masked(F, mask).to(dtype), Z.to(dtype), B.to(dtype)


def all_rows(length: int) -> range:
    if length > LONGEST_MATRIX:
        raise ValueError(
            f"return_attn=True with {length} tokens: at most {LONGEST_MATRIX}, since the matrix grows with the square "
            f"of the length; ask for rows, as return_attn=[0] for the first token, or for return_attn_matrices=True."
        )
    return range(length)
