"""`NystromAttention`: the operation as a layer on (b, n, dim), with its projections."""

from typing import Any

import torch
from torch import Tensor, nn

from nystromformer.attention.common import all_valid, check_mask, shape_of
from nystromformer.attention.nystrom import NystromOptions, nystrom_attention
from nystromformer.attention.nystrom_varlen import nystrom_attention_varlen
from nystromformer.attention.skip_convolution import SkipConvolution
from nystromformer.checks import check_at_least, check_fraction, check_odd


class NystromAttention(nn.Module):
    """Multi-head Nyström attention: projections, `nystrom_attention` with its skip convolution, output projection.

    Args:
        dim: width of the input and the output.
        num_heads, head_dim: `head_dim` is dim / num_heads by default.
        num_landmarks: m; exact for examples with at most m valid tokens.
        conv_kernel_size: odd; None leaves the skip convolution out.
        pinv_iterations: steps of the pseudoinverse.
        exact_below: examples with at most so many valid tokens are computed exactly, even if there are more than m.
        dropout: on the output.
        bias: of the four projections.

    >>> layer = NystromAttention(dim=256, num_heads=8)
    >>> x = torch.randn(2, 1000, 256)
    >>> mask = torch.arange(1000) < torch.tensor([[1000], [700]])
    >>> layer(x, mask=mask).shape
    torch.Size([2, 1000, 256])
    """

    operation = staticmethod(nystrom_attention)
    """What attends. An instance can be given another function of this signature: `nystromformer.distributed` does."""
    splits_over_ranks = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        head_dim: int | None = None,
        num_landmarks: int = 64,
        conv_kernel_size: int | None = 33,
        pinv_iterations: int = 6,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        exact_below: int | None = None,
    ) -> None:
        super().__init__()
        check_at_least("dim", dim, 1)
        check_at_least("num_heads", num_heads, 1)
        check_fraction("dropout", dropout)
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(f"dim={dim} is not divisible by num_heads={num_heads}: change one, or give head_dim.")
            head_dim = dim // num_heads
        check_at_least("head_dim", head_dim, 1)
        if conv_kernel_size is not None:
            check_odd("conv_kernel_size", conv_kernel_size)
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim
        self.options = NystromOptions(
            num_landmarks=num_landmarks, pinv_iterations=pinv_iterations, exact_below=exact_below
        )
        self.query = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.key = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.value = nn.Linear(dim, num_heads * head_dim, bias=bias)
        self.conv = None if conv_kernel_size is None else SkipConvolution(num_heads, conv_kernel_size)
        self.output = nn.Linear(num_heads * head_dim, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None,
        context_mask: Tensor | None = None, *, cu_seqlens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend from `x` (b, n, dim) to itself, or to `context` (b, s, dim): (b, n, dim).

        With `cu_seqlens` (b + 1), from 0 to the number of tokens, `x` (tokens, dim) holds sequences one after the
        other, of which each gives what it gives alone.


        `mask` (b, n) and `context_mask` (b, s) are True for real tokens. Masked rows of the attention's output are 0
        before the output projection. The skip convolution belongs to self-attention: with a context it is not used.
        """
        if cu_seqlens is not None:
            return self._attend_packed(x, cu_seqlens, {"mask": mask, "context": context, "context_mask": context_mask})
        self._check_input("x", x)
        check_mask("mask", mask, x)
        if context is None:
            if context_mask is not None:
                raise ValueError("context_mask was given without context: give both, or use mask for x.")
            source = x
            masks: dict[str, Any] = {"mask": mask}
        else:
            self._check_input("context", context)
            check_mask("context_mask", context_mask, context)
            source, masks = context, self._masks_of_two(x, mask, context, context_mask)
        out = self.operation(
            self._split_heads(self.query(x)),
            self._split_heads(self.key(source)),
            self._split_heads(self.value(source)),
            **masks,
            conv_weight=self.conv.weight if self.conv is not None and context is None else None,
            **vars(self.options),
        )
        return self.dropout(self.output(out.transpose(1, 2).flatten(2)))

    def _attend_packed(self, x: Tensor, cu_seqlens: Tensor, others: dict[str, Tensor | None]) -> Tensor:
        for name, given in others.items():
            if given is not None:
                raise ValueError(f"{name} was given with cu_seqlens: packed sequences attend to themselves, unpadded.")
        if "operation" in vars(self):
            raise ValueError("cu_seqlens was given where sequences are split over processes: give a batch and mask.")
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != self.dim:
            given_shape = shape_of(x) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"x is {given_shape}: with cu_seqlens it must be (tokens, {self.dim}).")
        query, key, value = (
            project(x).unflatten(1, (self.num_heads, self.head_dim)) for project in (self.query, self.key, self.value)
        )  # (t h d)
        kernel = None if self.conv is None else self.conv.weight
        out = nystrom_attention_varlen(query, key, value, cu_seqlens, conv_weight=kernel, **vars(self.options))
        return self.dropout(self.output(out.flatten(1)))

    @staticmethod
    def _masks_of_two(
        x: Tensor, mask: Tensor | None, context: Tensor, context_mask: Tensor | None
    ) -> dict[str, Tensor]:
        """Here, where it is known that there are two sequences, a mask that was left out means that all is valid."""
        if mask is None and context_mask is None:
            return {}
        return {
            "query_mask": all_valid(x) if mask is None else mask,
            "key_mask": all_valid(context) if context_mask is None else context_mask,
        }

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)  # (b h n d)

    def _check_input(self, name: str, x: Tensor) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: must be a torch.Tensor.")
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"{name} has shape {shape_of(x)}: must be (batch, length, {self.dim}).")
