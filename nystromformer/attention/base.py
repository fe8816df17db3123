"""What every attention has in common: one signature, and capabilities declared on the class."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from nystromformer.attention.shared.common import check_tokens, rows_of_map, shape_of
from nystromformer.attention.shared.varlen import each_alone, packed_input
from nystromformer.checks import check_at_least

Length = int | None
"""The most tokens that an attention will see; None: any number."""
Function = TypeVar("Function", bound=Callable[..., Any])


def with_options(options: type) -> Callable[[Function], Function]:
    """Show the fields of a dataclass in the signature of a function that takes them as its `**options`.

    So options are listed once, with their defaults, and `help`, `inspect` and editors know them all the same.
    """

    def show(function: Function) -> Function:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        positional = [each for each in own if each.kind is not each.KEYWORD_ONLY]
        shown = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in fields(options)
        ]
        others = [each for each in own if each.kind is each.KEYWORD_ONLY]
        function.__signature__ = signature.replace(parameters=[*positional, *shown, *others])  # type: ignore[attr-defined]
        return function

    return show


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
    packed_operation: ClassVar[Callable[..., Tensor] | None] = None
    """The function `f(query, key, value, cu_seqlens, *, …)` for packed sequences; None: `operation` of each alone."""
    takes_packed: ClassVar[bool] = True
    """Takes sequences that are packed one after the other, with `cu_seqlens`."""
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
    suits_trained_weights: ClassVar[bool] = False
    """In weights that were trained with exact attention it begins near what they gave."""
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
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:  # fmt: skip
        """(b, h, n, d) from `query` (b, h, n, d), `key` and `value` (b, h, s, d); n = s without `cross_attention`.

        With `cu_seqlens` (b + 1), or `cu_seqlens_q` and `cu_seqlens_k`, all are (tokens, h, d) of packed sequences, of
        which each gives what it gives alone; nested tensors of the jagged layout need no `cu_seqlens`. `max_seqlen` is
        the most tokens of a sequence: compiled graphs of all but `nystrom` pad to it.
        """
        borders = {"cu_seqlens": cu_seqlens, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        masks = {"mask": mask, "query_mask": query_mask, "key_mask": key_mask}
        if any(each is not None for each in borders.values()) or getattr(query, "is_nested", False):
            given = next((name for name, each in masks.items() if each is not None), None)
            if given is not None:
                raise ValueError(f"{given} was given with packed sequences, which have no padding: leave it out.")
            told = {name: each for name, each in borders.items() if each is not None}
            return self._attend_packed(query, key, value, told, max_seqlen)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            self._check_size(name, tensor)
        overrides = {name: each for name, each in masks.items() if name != "mask" and each is not None}
        if overrides and not self.cross_attention:
            raise ValueError(
                f"{next(iter(overrides))} was given: {type(self).__name__} is for self-attention, where there is one "
                f"mask; give mask."
            )
        return self.operation(query, key, value, mask, **overrides, **self.arguments(query))

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, borders: dict[str, Tensor], max_seqlen: int | None
    ) -> Tensor:
        if not self.takes_packed:
            raise ValueError(
                f"packed sequences were given: {type(self).__name__} takes none; give a padded batch and mask."
            )
        if "operation" in vars(self):
            raise ValueError(
                f"packed sequences were given to {type(self).__name__} with an operation of its own, as where "
                f"sequences are split over processes: give a batch (batch, heads, length, head size) and mask."
            )
        packed = packed_input(query, key, value, **borders)
        if not packed.is_self_attention and not self.cross_attention:
            raise ValueError(
                f"sequences of queries and of keys were given: {type(self).__name__} is for self-attention; give "
                f"cu_seqlens."
            )
        longest = max_seqlen
        if self.needs_fixed_length and not torch.compiler.is_compiling():
            longest = max(packed.queries.read_lengths())
        for name, rows in (("query", packed.query), ("key", packed.key), ("value", packed.value)):
            self._check_sizes(name, rows, "(tokens, {h}, {d})", longest)
        arguments = self.arguments(packed.as_one[0])
        if self.packed_operation is None:
            return packed.result(each_alone(self.operation, packed, max_seqlen, **arguments))
        return self.packed_operation(query, key, value, **borders, max_seqlen=max_seqlen, **arguments)

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
        check_tokens(name, tensor)
        self._check_sizes(name, tensor, "(batch, {h}, length, {d})", tensor.shape[2])

    def _check_sizes(self, name: str, tensor: Tensor, wanted: str, length: int | None) -> None:
        """What only the module knows; the operation checks everything else."""
        if tensor.shape[1] != self.num_heads or tensor.shape[-1] != self.head_dim:
            raise ValueError(
                f"{name} has shape {shape_of(tensor)}: {type(self).__name__} was built with num_heads={self.num_heads} "
                f"and head_dim={self.head_dim}, so it must be {wanted.format(h=self.num_heads, d=self.head_dim)}."
            )
        most = self.max_length if self.needs_fixed_length else None
        if most is not None and length is not None and length > most:
            raise ValueError(
                f"length {length}: {type(self).__name__} was built with max_length={self.max_length}; "
                f"shorten the input or build it with a larger max_length."
            )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, max_length={self.max_length}"


def attentions_in(module: nn.Module) -> Iterator[Attention]:
    """The attentions of `build_attention` inside `module`, itself included."""
    return (part for part in module.modules() if isinstance(part, Attention))
