"""What every attention has in common: one signature, and capabilities declared on the class."""

from typing import ClassVar

from torch import Tensor, nn

from nystromformer.attention.common import check_mask, check_query_key_value, shape_of
from nystromformer.checks import check_at_least


class Attention(nn.Module):
    """Self-attention over (b, h, n, d). Subclasses declare what they can do and implement `attend`.

    `mask` is boolean (b, n), True for a real token. Every attention keeps one contract: masked content never reaches a
    real token, an example's output does not depend on its batch, and masked rows of the output are exactly 0.
    """

    accepts_masks: ClassVar[bool] = True
    """A padding mask is honoured."""
    needs_fixed_length: ClassVar[bool] = False
    """Has parameters for each position, so `max_length` must be given and can't be exceeded."""
    shares_query_key: ClassVar[bool] = False
    """Uses one projection for queries and keys: `key` is ignored."""
    exact: ClassVar[bool] = False
    """Computes softmax attention without approximation."""
    stochastic: ClassVar[bool] = False
    """Draws random numbers, so results depend on the seed."""
    linear: ClassVar[bool] = True
    """Time and memory grow linearly with the length."""
    size_option: ClassVar[str | None] = None
    """The option that a suffix such as the 64 of `nystrom-64` sets."""

    def __init__(self, num_heads: int, head_dim: int, max_length: int | None = None) -> None:
        super().__init__()
        check_at_least("num_heads", num_heads, 1)
        check_at_least("head_dim", head_dim, 1)
        if max_length is not None:
            check_at_least("max_length", max_length, 1)
        elif self.needs_fixed_length:
            raise ValueError(
                f"max_length=None: {type(self).__name__} has parameters for each position; "
                f"give the longest length it will see, as max_length=4096."
            )
        self.num_heads, self.head_dim, self.max_length = num_heads, head_dim, max_length

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        check_query_key_value(query, key, value)
        check_mask("mask", mask, query)
        expected = (query.shape[0], self.num_heads, query.shape[2], self.head_dim)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.shape != expected:
                raise ValueError(
                    f"{name} has shape {shape_of(tensor)}: {type(self).__name__} was built for self-attention with "
                    f"num_heads={self.num_heads} and head_dim={self.head_dim}, so all three must be {expected}."
                )
        if self.needs_fixed_length and query.shape[2] > self.max_length:
            raise ValueError(
                f"length {query.shape[2]}: {type(self).__name__} was built with max_length={self.max_length}; "
                f"shorten the input or build it with a larger max_length."
            )
        return self.attend(query, key, value, mask)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, max_length={self.max_length}"
