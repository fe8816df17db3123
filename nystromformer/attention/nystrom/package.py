"""The layer of the `nystrom-attention` package: its weights, and with `legacy=True` its numbers.

Weights that were trained with the package saw what it does to a sequence: zeros in front complete it to a multiple of
m, and without a mask they count as tokens; the pseudoinverse starts from norms over the whole batch; rows that are
masked spread evenly. `package_attention` computes just that, from two calls of `scaled_dot_product_attention` around
the pseudoinverse, so that no n×m matrix is made. Without `legacy` the layer keeps the contract of `nystrom_attention`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from nystromformer.attention.nystrom.operation import (
    NystromOptions,
    landmark_core,
    masked_softmax,
    nystrom_attention,
    nystrom_attention_weights,
)
from nystromformer.attention.nystrom.pseudoinverse import iterative_pinv
from nystromformer.attention.nystrom.varlen import nystrom_attention_varlen
from nystromformer.attention.shared.common import (
    at_least_float32,
    check_mask,
    check_self_attention,
    checked_rows,
    checked_scale,
    full_precision,
    key_padding_mask,
    shape_of,
    softmax_attention,
    zero_masked,
)
from nystromformer.attention.shared.skip_convolution import SkipConvolution, kernel_of, skip_convolution
from nystromformer.checks import check_at_least, check_fraction, check_odd

LONGEST_MATRIX = 4096
"""Sequences for which the whole attention matrix is given: 8 heads of 4,096² float32 are 537 MB per example."""

Factors = tuple[Tensor, Tensor, Tensor]


def package_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
    num_landmarks: int = 256,
    conv_weight: Tensor | None = None,
    pinv_iterations: int = 6,
    eps: float = 1e-8,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """What the package computes from (b, h, n, d): (b, h, N, e), N being n completed to a multiple of m, in front.

    The last n rows belong to the tokens. `eps` is added to the number of tokens that a masked mean divides by.

    >>> query = key = value = torch.randn(1, 2, 10, 4)
    >>> package_attention(query, key, value, num_landmarks=8).shape
    torch.Size([1, 2, 16, 4])
    """
    check_self_attention(query, key, value, mask)
    if conv_weight is not None:
        conv_weight = kernel_of(conv_weight, value.shape[1], value.dtype)
    with full_precision(query):
        core = _package_core(query, key, mask, num_landmarks, pinv_iterations, eps, scale)
        value, dtype = zero_masked(_padded(value, num_landmarks), core.mask), value.dtype
        BV = softmax_attention(core.landmark_queries.to(dtype), core.key, value, key_padding_mask(core.mask), 1.0)
        BV = _even_where_masked(BV, value, core.occupied)
        W = (core.inverse @ BV.to(core.inverse.dtype)).to(dtype)  # (b h m e)
        out = softmax_attention(core.query, core.landmark_keys.to(dtype), W, key_padding_mask(core.occupied), 1.0)
        out = _even_where_masked(out, W, core.mask)
        return out if conv_weight is None else out + skip_convolution(value, conv_weight)


def package_factors(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    rows: Sequence[int] | Tensor | None = None,
    num_landmarks: int = 256,
    pinv_iterations: int = 6,
    eps: float = 1e-8,
    scale: float | None = None,
) -> Factors:
    """F (b, h, N, m), Z (b, h, m, m) and B (b, h, m, N) whose product is the package's attention matrix.

    `rows` are tokens to make F of, (b, h, len(rows), m), instead of all N.
    """
    check_self_attention(query, key, None, mask)
    with full_precision(query):
        dtype, length = query.dtype, query.shape[2]
        core = _package_core(query, key, mask, num_landmarks, pinv_iterations, eps, scale)
        asked, asked_mask = core.query, core.mask
        if rows is not None:
            index = checked_rows(rows, query) + core.query.shape[2] - length
            asked, asked_mask = asked[:, :, index], None if core.mask is None else core.mask[:, index]
        wide = core.inverse.dtype
        F = _softmax_even_where_masked(asked.to(wide) @ core.landmark_keys.mT, asked_mask, core.occupied)
        B = _softmax_even_where_masked(core.landmark_queries @ core.key.to(wide).mT, core.occupied, core.mask)
        return F.to(dtype), core.inverse.to(dtype), B.to(dtype)


def contract_factors(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, options: NystromOptions) -> Factors:
    """F (b, h, n, m), Z (b, h, m, m) and B (b, h, m, n) whose product is the matrix of `nystrom_attention`.

    Where an example has at most m valid tokens F holds its exact weights; Z is then the identity, and B puts each
    weight to its token. With n < m there are n landmarks.
    """
    m, dtype, wide = min(options.num_landmarks, query.shape[2]), query.dtype, at_least_float32(query.dtype)
    options = NystromOptions(num_landmarks=m, pinv_iterations=options.pinv_iterations)
    with full_precision(query):
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


class PackageArithmetic(nn.Module):
    """Attention on heads by the package's arithmetic with `legacy`, and otherwise by the contract; rows and factors.

    Layers that differ in their projections share it. They set the attributes, which are read in each call, because
    code that uses such layers sets them.
    """

    num_landmarks: int
    pinv_iterations: int
    scale: float
    eps: float
    legacy: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kernel: Tensor | None) -> Tensor:
        """(b, h, n, e) from (b, h, n, d); with `legacy` the zeros in front are still there: take the last n rows."""
        operation = package_attention if self.legacy else nystrom_attention
        return operation(query, key, value, mask, conv_weight=kernel, **self._options())

    def rows(self, query: Tensor, key: Tensor, mask: Tensor | None, rows: Sequence[int] | Tensor | None) -> Tensor:
        """Rows of the attention matrix, (b, h, len(rows), n). None: the whole matrix, with `legacy` of N tokens."""
        length = query.shape[2]
        if not self.legacy:
            each = range(length) if rows is None else rows
            return nystrom_attention_weights(query, key, each, mask, **self._options())
        F, Z, B = package_factors(query, key, mask, rows=rows, **self._options())
        weights = F @ Z @ B
        return weights if rows is None else weights[..., self.padding(length) :]

    def factors(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Factors:
        if self.legacy:
            return package_factors(query, key, mask, **self._options())
        options = NystromOptions(num_landmarks=self.num_landmarks, pinv_iterations=self.pinv_iterations)
        return contract_factors(query, key, mask, self.scale, options)

    def padding(self, length: int) -> int:
        """The zeros that complete so many tokens."""
        return -length % self.num_landmarks if self.legacy else 0

    def _options(self) -> dict[str, Any]:
        options = {"num_landmarks": self.num_landmarks, "pinv_iterations": self.pinv_iterations, "scale": self.scale}
        return options | ({"eps": self.eps} if self.legacy else {})

    def extra_repr(self) -> str:
        return f"num_landmarks={self.num_landmarks}, pinv_iterations={self.pinv_iterations}, legacy={self.legacy}"


class PackageAttention(PackageArithmetic):
    """Multi-head Nyström attention on (b, n, dim), with the arguments, attributes and weights of the package.

    Args:
        dim, dim_head, heads: sizes.
        num_landmarks: m; exact for examples with at most m valid tokens, unless `legacy`.
        pinv_iterations: steps of the pseudoinverse.
        residual, residual_conv_kernel: the convolution of the values, and its odd kernel size.
        eps: used with `legacy` only; elsewhere means divide by the number of valid tokens, which is never 0.
        dropout: on the output.
        legacy: compute exactly what the package computes, for weights that were trained with it. An example's output
            then depends on its batch and on its length.
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
        legacy: bool = False,
    ) -> None:
        super().__init__()
        check_at_least("dim", dim, 1)
        check_at_least("dim_head", dim_head, 1)
        check_at_least("heads", heads, 1)
        check_fraction("dropout", dropout)
        NystromOptions(num_landmarks=num_landmarks, pinv_iterations=pinv_iterations)  # checks them
        self.dim, self.dim_head, self.heads, self.scale = dim, dim_head, heads, dim_head**-0.5
        self.num_landmarks, self.pinv_iterations, self.eps = num_landmarks, pinv_iterations, eps
        self.residual, self.legacy = residual, legacy
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
    ) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Factors]:
        """Attend within `x` (b, n, dim): (b, n, dim). `mask` (b, n) is True for real tokens.

        Args:
            return_attn: rows such as [0] to also get them, (b, h, len(rows), n), in O(n·m); True for the whole matrix
                of short input, (b, h, n, n), with `legacy` of the completed length as in the package.
            return_attn_matrices: also get the three factors of the matrix, (b, h, n, m), (b, h, m, m), (b, h, m, n).
        """
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x has shape {shape_of(x)}: must be (batch, length, {self.dim}).")
        check_mask("mask", mask, x)
        length = x.shape[1]
        if return_attn is True and not return_attn_matrices:
            check_matrix_length("return_attn", length + self.padding(length))
        query, key, value = (
            y.unflatten(2, (self.heads, self.dim_head)).transpose(1, 2) for y in self.to_qkv(x).chunk(3, dim=2)
        )  # (b h n d)
        out = self.attend(query, key, value, mask, self.res_conv.weight if self.residual else None)
        # The zeros in front stay until after the dropout, so that training draws what the package draws.
        out = self.to_out(out.transpose(1, 2).flatten(2))[:, -length:]
        if return_attn_matrices:
            return out, self.factors(query, key, mask)
        if return_attn is False:
            return out
        return out, self.rows(query, key, mask, None if isinstance(return_attn, bool) else return_attn)

    def attend_packed(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Attend within each sequence of `x` (tokens, dim), packed with borders `cu_seqlens` (b + 1): (tokens, dim)."""
        if self.legacy:
            raise ValueError(
                "packed sequences were given with legacy=True: the package has none; give them one by one."
            )
        if x.dim() != 2 or x.shape[1] != self.dim:
            raise ValueError(f"x has shape {shape_of(x)}: packed sequences must be (tokens, {self.dim}).")
        query, key, value = self.to_qkv(x).unflatten(1, (3, self.heads, self.dim_head)).unbind(1)  # (t h d)
        kernel = self.res_conv.weight if self.residual else None
        out = nystrom_attention_varlen(query, key, value, cu_seqlens, conv_weight=kernel, **self._options())
        return self.to_out(out.flatten(1))


@dataclass(frozen=True)
class _PackageCore:
    query: Tensor  # (b h N d), scaled
    key: Tensor  # (b h N d)
    mask: Tensor | None  # (b N)
    landmark_queries: Tensor  # (b h m d), at least float32
    landmark_keys: Tensor  # (b h m d)
    occupied: Tensor | None  # (b m): the landmarks that stand for a token; None without a mask
    inverse: Tensor  # (b h m m)


def _package_core(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    num_landmarks: int,
    pinv_iterations: int,
    eps: float,
    scale: float | None,
) -> _PackageCore:
    scale, wide = checked_scale(scale, query), at_least_float32(query.dtype)
    query, key = _padded(query, num_landmarks), _padded(key, num_landmarks)
    if mask is not None:
        mask = functional.pad(mask, (query.shape[2] - mask.shape[1], 0), value=False)
    query, key = scale * zero_masked(query, mask), zero_masked(key, mask)
    segments = (num_landmarks, query.shape[2] // num_landmarks)
    counts: Tensor | None = None if mask is None else mask.unflatten(1, segments).sum(dim=2)  # (b m)
    # An integer plus a float is float32 for models of float64, too: what eps does to them is rounded as in the package.
    divisor = segments[1] if counts is None else (counts + eps)[:, None, :, None]
    queries, keys = (x.to(wide).unflatten(2, segments).sum(dim=3) / divisor for x in (query, key))
    occupied = None if counts is None else counts > 0
    A = _softmax_even_where_masked(queries @ keys.mT, occupied, occupied)
    return _PackageCore(query, key, mask, queries, keys, occupied, iterative_pinv(A, pinv_iterations, "batch"))


def _padded(x: Tensor, multiple: int) -> Tensor:
    """`x` (b, h, n, d) with zeros in front."""
    return functional.pad(x, (0, 0, -x.shape[2] % multiple, 0))


def _softmax_even_where_masked(logits: Tensor, row_mask: Tensor | None, column_mask: Tensor | None) -> Tensor:
    """The softmax over allowed columns; masked rows have the same weight everywhere, masked columns included."""
    if row_mask is None or column_mask is None:
        return torch.softmax(logits, dim=-1)
    allowed = row_mask[:, None, :, None] & column_mask[:, None, None, :]
    return torch.softmax(logits.masked_fill(~allowed, torch.finfo(logits.dtype).min), dim=-1)


def _even_where_masked(out: Tensor, value: Tensor, row_mask: Tensor | None) -> Tensor:
    """The same for rows that were attended already: `out` (b, h, n, e) with the mean of `value` in masked rows."""
    if row_mask is None:
        return out
    return torch.where(row_mask[:, None, :, None], out, value.mean(dim=2, keepdim=True))


def check_matrix_length(name: str, length: int) -> None:
    """Refuse the whole matrix, asked for by the argument `name`, of too many tokens."""
    if length > LONGEST_MATRIX:
        raise ValueError(
            f"{name}=True with {length} tokens: at most {LONGEST_MATRIX}, since the matrix grows with the square of "
            f"the length; ask for rows, as {name}=[0] for the first token."
        )
