"""What every attention has in common: one signature, and capabilities declared on the class."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from nystromformer.attention.common import check_tokens, rows_of_map, shape_of
from nystromformer.checks import check_at_least


class Attention(nn.Module):
    """Attention over (b, h, n, d). Subclasses declare what they can do, and what computes it.

    `mask` is boolean (b, n), True for a real token. Every attention keeps one contract: masked content never reaches a
    real token, an example's output does not depend on its batch, and masked rows of the output are exactly 0.
    """

    name: ClassVar[str]
    """What `build_attention` calls it."""
    operation: Callable[..., Tensor]
    """The function `f(query, key, value, mask=None, *, …)` that attends. An instance can be given another one of the
    same signature: `nystromformer.distributed` does."""
    size_option: ClassVar[str | None] = None
    """The option that a suffix such as the 64 of `nystrom-64` sets."""
    linear: ClassVar[bool] = True
    """Time and memory grow linearly with the length."""
    stochastic: ClassVar[bool] = False
    """Draws random numbers, so results depend on the seed."""
    needs_fixed_length: ClassVar[bool] = False
    """Has parameters for each position, so `max_length` must be given and can't be exceeded."""
    shares_query_key: ClassVar[bool] = False
    """Uses one projection for queries and keys: `key` is ignored."""
    cross_attention: ClassVar[bool] = False
    """Takes keys of another sequence than the queries, with `query_mask` and `key_mask`."""
    takes_convolution: ClassVar[bool] = False
    """Its operation takes `conv_weight`, and its constructor `conv_kernel_size`."""
    has_map: ClassVar[bool] = True
    """Multiplies the values with a matrix that is the same in each call, so that `weights` can show it."""
    keeps_own_start: ClassVar[bool] = True
    """A model that initializes its weights leaves those in here to `reset_parameters` and `new_buffers`."""
    splits_over_ranks: ClassVar[bool] = False
    """`nystromformer.distributed` has an operation for sequences that are split over processes."""

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

    @classmethod
    def option_defaults(cls) -> dict[str, Any]:
        """The keyword options of the constructor, in order, with their defaults."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}

    @property
    def exact_up_to(self) -> float:
        """The most tokens for which this is softmax attention without approximation; infinity: any number."""
        return 0

    def arguments(self, query: Tensor) -> dict[str, Any]:
        """What the operation is given besides tensors and masks, in a call with `query`."""
        return {}

    def reset_parameters(self) -> None:
        """Start the parameters anew. There are none unless a subclass says so."""

    def new_buffers(self) -> dict[str, Tensor]:
        """Buffers that start at random, drawn anew."""
        return {}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """(b, h, n, d) from `query` (b, h, n, d), `key` and `value` (b, h, s, d); n = s without `cross_attention`."""
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            self._check_size(name, tensor)
        overrides = {"query_mask": query_mask, "key_mask": key_mask}
        given = {name: each for name, each in overrides.items() if each is not None}
        if given and not self.cross_attention:
            raise ValueError(
                f"{next(iter(given))} was given: {type(self).__name__} is for self-attention, where there is one mask; "
                f"give mask."
            )
        return self.operation(query, key, value, mask, **given, **self.arguments(query))

    def weights(self, query: Tensor, key: Tensor, rows: Sequence[int] | Tensor, mask: Tensor | None = None) -> Tensor:
        """Rows of the matrix that values are multiplied with, (b, h, len(rows), n), in memory linear in n.

        The skip convolution is not part of it. The default gives no gradients.
        """
        if not self.has_map:
            raise ValueError(f"{type(self).__name__} has no attention matrix to show: it is another in each call.")
        for name, tensor in (("query", query), ("key", key)):
            self._check_size(name, tensor)
        arguments = self.arguments(query) | ({"conv_weight": None} if self.takes_convolution else {})
        return rows_of_map(self.operation, query, key, rows, mask, **arguments)

    def _check_size(self, name: str, tensor: Tensor) -> None:
        """What only the module knows; the operation checks everything else."""
        check_tokens(name, tensor)
        if tensor.shape[1] != self.num_heads or tensor.shape[3] != self.head_dim:
            raise ValueError(
                f"{name} has shape {shape_of(tensor)}: {type(self).__name__} was built with num_heads={self.num_heads} "
                f"and head_dim={self.head_dim}, so it must be (batch, {self.num_heads}, length, {self.head_dim})."
            )
        if self.needs_fixed_length and self.max_length is not None and tensor.shape[2] > self.max_length:
            raise ValueError(
                f"length {tensor.shape[2]}: {type(self).__name__} was built with max_length={self.max_length}; "
                f"shorten the input or build it with a larger max_length."
            )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, max_length={self.max_length}"


def attentions_in(module: nn.Module) -> Iterator[Attention]:
    """The attentions of `build_attention` inside `module`, itself included."""
    return (part for part in module.modules() if isinstance(part, Attention))
