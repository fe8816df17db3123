"""Sequences of any length: packed one after the other as (tokens, heads, width), or the valid tokens of padded batches.

Borders are told as in flash-attn: `cu_seqlens`, whole numbers (b + 1), the i-th sequence going from `cu_seqlens[i]` up
to `cu_seqlens[i + 1]`. PyTorch's nested tensors of the jagged layout know their own borders.

Where Python can read the borders, each sequence is a view. Elsewhere (on other devices, in compiled graphs) shapes may
depend on the numbers of tokens and of sequences alone: `Spread` then gives every sequence room that is known before.

A batch that is padded to its longest example spends its time on padding as on tokens, and masks cost copies of all
queries, keys and values. Both are avoided where each example's valid tokens stand together and Python can read the
mask: `valid_spans` tells where they are, and `attend_to_spans` computes each example alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from nystromformer.attention.native.library import large_pages
from nystromformer.attention.shared.common import (
    check_floating,
    check_query_key_value,
    checked_scale,
    is_readable,
    refuse_causal,
    refuse_forward_mode,
    shape_of,
)
from nystromformer.attention.shared.skip_convolution import kernel_of
from nystromformer.checks import check_at_least


@dataclass
class Packing:
    """Where sequences begin and end among packed tokens."""

    offsets: Tensor  # (b + 1,), long
    tokens: int
    lengths: list[int] | None  # where Python could read them
    _owner: Tensor | None = None  # made when first asked for: graphs know no functools.cached_property

    @property
    def number(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def counts(self) -> Tensor:
        """(b,): the tokens of each sequence."""
        return self.offsets.diff()

    @property
    def owner(self) -> Tensor:
        """(tokens,): the sequence of each token."""
        if self._owner is None:
            places = torch.arange(self.tokens, device=self.offsets.device)
            self._owner = torch.searchsorted(self.offsets[1:-1].contiguous(), places, right=True)
        return self._owner

    @property
    def rank(self) -> Tensor:
        """(tokens,): the place of each token in its sequence."""
        return torch.arange(self.tokens, device=self.offsets.device) - self.offsets[self.owner]

    def read_lengths(self) -> list[int]:
        """The tokens of each sequence as numbers, for which another device than a CPU is waited for."""
        return self.counts.tolist() if self.lengths is None else self.lengths

    def chunked(self, size: int) -> "Spread":
        """Each sequence from a multiple of `size` on, so that no chunk of so many places holds tokens of two."""
        chunks = (self.counts + size - 1) // size
        places = (self.tokens + self.number * (size - 1)) // size * size
        return Spread(self, (chunks.cumsum(0) - chunks) * size, places)

    def spaced(self, gap: int) -> "Spread":
        """Each sequence at least `gap` places after the one before."""
        between = torch.arange(self.number, device=self.offsets.device) * gap
        return Spread(self, self.offsets[:-1] + between, self.tokens + (self.number - 1) * gap)

    def padded(self, length: int) -> "Spread":
        """Each sequence in a row of `length` places, the most that one may have."""
        rows = torch.arange(self.number, device=self.offsets.device)
        return Spread(self, rows * length, self.number * length)


class Spread:
    """Places for packed tokens in a longer row, with empty ones between sequences."""

    def __init__(self, packing: Packing, first: Tensor, places: int) -> None:
        self.packing, self.places = packing, places
        self.first = first  # (b,): the place of each sequence's first token
        self.place = first[packing.owner] + packing.rank  # (tokens,): where each token goes

    @property
    def present(self) -> Tensor:
        """(places,): which hold a token."""
        return torch.zeros(self.places, dtype=torch.bool, device=self.place.device).index_fill(0, self.place, True)

    def owner_of(self, place: Tensor) -> Tensor:
        """The sequence that a place belongs to; of the empty ones at the end: any."""
        return torch.searchsorted(self.first[1:].contiguous(), place, right=True)

    def spread(self, x: Tensor) -> Tensor:
        """(tokens, ...) → (places, ...), zeros between."""
        return x.new_zeros(self.places, *x.shape[1:]).index_copy(0, self.place, x)

    def collect(self, x: Tensor) -> Tensor:
        """(places, ...) → (tokens, ...)."""
        return x.index_select(0, self.place)


@dataclass(frozen=True)
class PackedInput:
    """Queries, keys and values of packed sequences, checked."""

    query: Tensor  # (t, h, d)
    key: Tensor  # (s, h, d)
    value: Tensor  # (s, h, e)
    queries: Packing
    keys: Packing  # the very same object for self-attention
    nested: Tensor | None = None  # the queries as they came, where that is a nested tensor

    @property
    def is_self_attention(self) -> bool:
        return self.keys is self.queries

    @property
    def as_one(self) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens as one sequence: views (1, h, t, d), (1, h, s, d), (1, h, s, e)."""
        return as_batch(self.query), as_batch(self.key), as_batch(self.value)

    def checked(self, scale: float | None, conv_weight: Tensor | None, is_causal: bool) -> tuple[float, Tensor | None]:
        """The scale of the logits and the kernel (h, k) of a skip convolution, from what a caller gave."""
        refuse_causal(is_causal)
        refuse_forward_mode(self.query, self.key, self.value, conv_weight)
        kernel = None
        if conv_weight is not None:
            if not self.is_self_attention:
                raise ValueError(
                    "conv_weight was given with cu_seqlens_q and cu_seqlens_k: the skip convolution belongs to "
                    "self-attention; leave conv_weight out."
                )
            kernel = kernel_of(conv_weight, self.value.shape[1], self.value.dtype)
        return checked_scale(scale, as_batch(self.query)), kernel

    def sequences(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Each sequence alone: views (1, h, l, d)."""
        lengths, key_lengths = self.queries.read_lengths(), self.keys.read_lengths()
        pairs = (self.query, lengths), (self.key, key_lengths), (self.value, key_lengths)
        queries, keys, values = ([as_batch(rows) for rows in x.split(sizes)] for x, sizes in pairs)
        return queries, keys, values

    def result(self, out: Tensor) -> Tensor:
        """`out` (t, h, e) in the form that the queries came in."""
        if self.nested is None:
            return out
        axis = _ragged_axis(self.nested)
        values = out.movedim(0, axis - 1)
        return torch.nested.nested_tensor_from_jagged(values, _offsets(self.nested), jagged_dim=axis)


def packed_input(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> PackedInput:  # fmt: skip
    """What a caller gave, checked: `cu_seqlens` for self-attention, one for each side of cross-attention, or nested
    tensors, (b, j, h, d) or (b, h, j, d) with j the length that differs."""
    given = {"cu_seqlens": cu_seqlens, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    named = [name for name, each in given.items() if each is not None]
    if any(isinstance(x, Tensor) and x.is_nested for x in (query, key, value)):
        if named:
            raise ValueError(f"{named[0]} was given with nested tensors, which know their borders: leave it out.")
        return _nested_input(query, key, value)
    if named not in (["cu_seqlens"], ["cu_seqlens_q", "cu_seqlens_k"]):
        raise ValueError(
            f"{' and '.join(named) or 'no cu_seqlens'} given: give cu_seqlens for self-attention, or cu_seqlens_q and "
            f"cu_seqlens_k for cross-attention."
        )
    _check_rows(query, key, value)
    if cu_seqlens is not None:
        if query.shape[0] != key.shape[0]:
            raise ValueError(
                f"cu_seqlens was given with {query.shape[0]} queries and {key.shape[0]} keys: must be as many, of the "
                f"same sequences; give cu_seqlens_q and cu_seqlens_k for cross-attention."
            )
        queries = keys = packing("cu_seqlens", cu_seqlens, query)
    else:
        assert cu_seqlens_q is not None
        assert cu_seqlens_k is not None
        queries, keys = packing("cu_seqlens_q", cu_seqlens_q, query), packing("cu_seqlens_k", cu_seqlens_k, key)
        if queries.number != keys.number:
            raise ValueError(
                f"cu_seqlens_q has {queries.number} sequences and cu_seqlens_k {keys.number}: must be as many."
            )
    return PackedInput(query, key, value, queries, keys)


def packing(name: str, cu_seqlens: Tensor, tokens: Tensor) -> Packing:
    """`cu_seqlens` (b + 1), checked, for `tokens` (t, ...). What it holds is checked where that waits for no device."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} is a {type(cu_seqlens).__name__}: must be a torch.Tensor, as {_EXAMPLE}.")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {cu_seqlens.dtype}: must be torch.int32 or torch.int64, as {_EXAMPLE}.")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{name} has shape {shape_of(cu_seqlens)}: must be (sequences + 1,) with at least one sequence, as "
            f"{_EXAMPLE}."
        )
    if cu_seqlens.device != tokens.device:
        raise ValueError(f"{name} is on {cu_seqlens.device}, the tokens on {tokens.device}: must be on one device.")
    offsets, total = cu_seqlens.long(), tokens.shape[0]
    if not is_readable(offsets):
        return Packing(offsets, total, None)
    borders = offsets.tolist()
    if borders[0] != 0 or borders[-1] != total:
        raise ValueError(
            f"{name} goes from {borders[0]} to {borders[-1]}: must go from 0 to {total}, the number of tokens."
        )
    lengths = [after - first for first, after in pairwise(borders)]
    for i, length in enumerate(lengths):
        if length < 1:
            what = "empty" if length == 0 else f"{length} tokens long"
            raise ValueError(
                f"{name} says that sequence {i} is {what}: every sequence must have a token; leave it out."
            )
    return Packing(offsets, total, lengths)


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """`cu_seqlens` (b + 1) of sequences of these `lengths` (b,).

    >>> lengths_to_offsets(torch.tensor([3, 1, 4]))
    tensor([0, 3, 4, 8], dtype=torch.int32)
    """
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def each_alone(
    operation: Callable[..., Tensor], packed: PackedInput, max_seqlen: int | None = None, **arguments: Any
) -> Tensor:
    """`operation` `f(query, key, value, mask=None, *, …)` of each sequence alone: (t, h, e)."""
    if not torch.compiler.is_compiling():
        sequences = zip(*packed.sequences(), strict=True)
        return torch.cat([as_rows(operation(*sequence, **arguments)) for sequence in sequences])

    def attend(query: Tensor, key: Tensor, value: Tensor, query_mask: Tensor, key_mask: Tensor) -> Tensor:
        if packed.is_self_attention:
            return operation(query, key, value, query_mask, **arguments)
        return operation(query, key, value, query_mask=query_mask, key_mask=key_mask, **arguments)

    return attend_as_padded_batch(attend, packed, max_seqlen)


def attend_as_padded_batch(attend: Callable[..., Tensor], packed: PackedInput, max_seqlen: int | None) -> Tensor:
    """`attend` of the sequences as a batch (b, h, max_seqlen, d) with zeros as padding, and the masks (b, max_seqlen)
    of queries and of keys: (t, h, e). For graphs, which have no loop whose length depends on what the input holds.
    """
    if max_seqlen is None:
        raise ValueError(
            "max_seqlen=None in a compiled graph: must be the most tokens that a sequence has, since this attention's "
            "graph pads packed sequences to so many."
        )
    check_at_least("max_seqlen", max_seqlen, 1)
    queries, keys = packed.queries.padded(max_seqlen), packed.keys.padded(max_seqlen)
    shape = packed.queries.number, max_seqlen
    sides = (packed.query, queries), (packed.key, keys), (packed.value, keys)
    batch = [rows.spread(x).unflatten(0, shape).transpose(1, 2) for x, rows in sides]
    out = attend(*batch, queries.present.view(shape), keys.present.view(shape))  # (b h max e)
    return queries.collect(out.transpose(1, 2).flatten(0, 1))


_EXAMPLE = "torch.tensor([0, 3, 4, 8], dtype=torch.int32) for sequences of 3, 1 and 4 tokens"


def _check_rows(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_floating(name, tensor)
        if tensor.dim() != 3:
            raise ValueError(
                f"{name} has shape {shape_of(tensor)}: packed sequences must have 3 dimensions (tokens, heads, head "
                f"size); without cu_seqlens give (batch, heads, length, head size)."
            )
    check_query_key_value(as_batch(query), as_batch(key), as_batch(value))


def _nested_input(query: Tensor, key: Tensor, value: Tensor) -> PackedInput:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not (isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged):
            raise TypeError(
                f"{name} is no nested tensor of the jagged layout, as others are: make all three with "
                f"torch.nested.nested_tensor(..., layout=torch.jagged), or give packed tensors with cu_seqlens."
            )
        if x.dim() != 4 or _ragged_axis(x) == 3:
            raise ValueError(
                f"{name} is nested with {x.dim()} dimensions: must be (batch, length, heads, head size) or (batch, "
                f"heads, length, head size) with only the length differing."
            )
    offsets, key_offsets = _offsets(query), _offsets(key)
    query_rows, key_rows, value_rows = (x.values().movedim(_ragged_axis(x) - 1, 0) for x in (query, key, value))
    _check_rows(query_rows, key_rows, value_rows)  # (t h d)
    queries = keys = packing("the offsets of query", offsets, query_rows)
    if key_offsets is not offsets:
        keys = packing("the offsets of key", key_offsets, key_rows)
        if keys.number != queries.number:
            raise ValueError(f"query has {queries.number} sequences and key {keys.number}: must be as many.")
        if keys.lengths is not None and keys.lengths == queries.lengths:
            keys = queries
    return PackedInput(query_rows, key_rows, value_rows, queries, keys, query)


def _offsets(nested: Any) -> Tensor:
    """The borders of a nested tensor, which the annotations of plain ones leave out."""
    return nested.offsets()


def _ragged_axis(nested: Tensor) -> int:
    """The dimension whose size differs: a size that is no number."""
    return next(axis for axis, size in enumerate(nested.shape) if axis and not isinstance(size, int))


SMALLEST_EXAMPLE = 2**19
"""Queries of one padded example, n·h·d numbers, from which on its own calls cost less than its padding."""


def own_calls_pay(tokens: Tensor, ways: int = 1) -> bool:
    """Whether each example of `tokens` (b, h, n, d) is better computed by calls of its own than padded.

    `ways` is in how many ways the whole would be computed: 2 where some examples are to be exact (`exact_below`).
    """
    return ways * tokens.shape[1:].numel() >= SMALLEST_EXAMPLE


def valid_spans(mask: Tensor) -> list[tuple[int, int]] | None:
    """Where each example's valid tokens begin and end, for a `mask` (b, n) that Python can read.

    None where valid tokens have padding between them.

    >>> valid_spans(torch.arange(4096) < torch.tensor([[1000], [4096]]))
    [(0, 1000), (0, 4096)]
    """
    length = mask.shape[1]
    place = torch.arange(length)
    first = torch.where(mask, place, length).amin(1)
    after = torch.where(mask, place + 1, 0).amax(1)
    valid = mask.sum(1)
    first, after = torch.where(valid > 0, torch.stack((first, after)), 0)
    if (after - first != valid).any():
        return None
    return list(zip(first.tolist(), after.tolist(), strict=True))


def attend_to_spans(attend: Callable[..., Sequence[Tensor]], spans: list[tuple[int, int]], *tensors: Tensor) -> Tensor:
    """`attend` of each example's span alone, in its place in a result (b, h, n, e) of zeros.

    `attend` gets, for each of `tensors` (b, h, n, d), a list of (1, h, l, d), and gives a list of (1, h, l, e), with no
    mask left to heed.
    """
    batch, length = tensors[0].shape[0], tensors[0].shape[2]
    sizes = list(chain.from_iterable((first, after - first, length - after) for first, after in spans))
    examples = [[as_batch(rows) for rows in _rows(x).split(sizes)[1::3] if len(rows)] for x in tensors]
    if not torch.is_grad_enabled():
        # One after the other: memory of a result that is in its place already serves the next one.
        return _placed((attend(*([x] for x in each))[0] for each in zip(*examples, strict=True)), spans, tensors[-1])
    outs = iter(attend(*examples) if examples[0] else ())
    nothing = tensors[-1].new_zeros(0, *tensors[-1].shape[1::2])
    pieces = []
    for first, after in spans:
        out = as_rows(next(outs)) if first < after else nothing  # (l h e)
        pieces += [out.new_zeros(first, *out.shape[1:]), out, out.new_zeros(length - after, *out.shape[1:])]
    return torch.cat(pieces).unflatten(0, (batch, length)).transpose(1, 2)


def _placed(outs: Iterator[Tensor], spans: list[tuple[int, int]], like: Tensor) -> Tensor:
    """Each of `outs` in its span, zeros around it, written once each; as `like` (b, h, n, e)."""
    batch, heads, length, width = like.shape
    result = large_pages(like.new_empty(batch, length, heads, width))
    for rows, (first, after) in zip(result, spans, strict=True):
        rows[:first].zero_()
        rows[after:].zero_()
        if first < after:
            rows[first:after] = as_rows(next(outs))
    return result.transpose(1, 2)


def as_batch(rows: Tensor) -> Tensor:
    """One sequence (l, h, d) as a batch (1, h, l, d), a view."""
    return rows.transpose(0, 1)[None]


def as_rows(batch: Tensor) -> Tensor:
    """A batch (1, h, l, d) of one sequence as (l, h, d), a view."""
    return batch[0].transpose(0, 1)


def _rows(x: Tensor) -> Tensor:
    """(b, h, n, d) → (b·n, h, d), a view where it has the layout of projections."""
    return x.transpose(1, 2).flatten(0, 1)
