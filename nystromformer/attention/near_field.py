"""The exact near field of Nyström attention: the keys that each block of queries sees as they are.

They are those of the block itself, of its neighbours and, where asked for, of blocks chosen for it. Machine code of our
own sees them where they lie, together with the far field, in one softmax. Elsewhere the near part of all queries is
made by itself and merged with the far one.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from nystromformer.attention.chosen_blocks import chosen_part
from nystromformer.attention.native import MOST_COLUMNS, local_attention, near_attention, runs_native
from nystromformer.attention.nystrom_local_parts import ChosenBlocks, FarField, TokenBlocks
from nystromformer.attention.partial_softmax import MASKED, merge, merge_parts, shared_part, window_part


class NearField(Protocol):
    def of_rows(self, query: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Attention (c, r, e) of the queries (c, r, d) in `places` (c, r) to their near keys, and its log-sum-exp."""

    def with_far(self, far: FarField, values: Tensor) -> Tensor:
        """Attention (l, c, e) of all queries to their near keys and to `far` with these values (c, m, e)."""


def sees_in_place(blocks: TokenBlocks, *tensors: Tensor) -> bool:
    """Whether machine code serves blocks of this size, so that sequences need no margins."""
    return blocks.size <= MOST_COLUMNS and runs_native(*tensors)


@dataclass(frozen=True)
class Sequences:
    """What near fields are made of."""

    query: Tensor  # (l, c, d)
    key: Tensor  # (l, c, d); for `SeenInParts` with a margin of a block of zeros at both ends
    value: Tensor  # (l, c, e), as the keys
    bias: Tensor  # (c, l or more): of each key
    chosen: ChosenBlocks | None
    blocks: TokenBlocks
    scale: float


@dataclass(frozen=True)
class SeenInPlace:
    query: Tensor
    keys: tuple[Tensor, Tensor, Tensor, Tensor | None]  # key, value, bias, and chosen blocks (c, blocks, k)
    block: int
    scale: float

    @classmethod
    def of(cls, x: Sequences) -> "SeenInPlace":
        chosen = None if x.chosen is None else x.chosen.index_or_none
        return cls(x.query, (x.key, x.value, x.bias, chosen), x.blocks.size, x.scale)

    def of_rows(self, query: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return near_attention(query, places, *self.keys, self.block, self.scale)

    def with_far(self, far: FarField, values: Tensor) -> Tensor:
        return local_attention(self.query, *self.keys, far.key, values, far.bias[:, :, 0], self.block, self.scale)


@dataclass(frozen=True)
class SeenInParts:
    query: Tensor  # (g, c, s, d)
    near: tuple[Tensor, Tensor]  # attention of all queries to their near keys, and its log-sum-exp
    blocks: TokenBlocks
    scale: float

    @classmethod
    def of(cls, x: Sequences) -> "SeenInParts":
        s = x.blocks.size
        query = x.query.unflatten(0, (x.blocks.number, s)).transpose(1, 2)
        near = window_part(query, x.key, x.value, near_bias(x.bias, x.blocks), x.scale, s)
        if x.chosen is not None:
            seen = x.key[s:-s], x.value[s:-s], x.bias, x.chosen, x.blocks
            near = merge_parts(near, chosen_part(query, *seen, x.scale))
        return cls(query, near, x.blocks, x.scale)

    def of_rows(self, query: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        out, logsumexp = (self.blocks.pick(x.transpose(1, 2).flatten(0, 1), places) for x in self.near)
        return out, logsumexp

    def with_far(self, far: FarField, values: Tensor) -> Tensor:
        dtype = self.query.dtype
        part = shared_part(self.query, far.key.to(dtype), values.to(dtype), far.bias, self.scale)
        return merge(self.near, part).transpose(1, 2).flatten(0, 1)


def near_bias(bias: Tensor, blocks: TokenBlocks) -> Tensor:
    """`bias` (c, number·size) for the window of each block: (number, c, 1, 3·size), as views."""
    bias = functional.pad(bias, (blocks.size, blocks.size), value=MASKED)
    return bias.unfold(1, 3 * blocks.size, blocks.size).transpose(0, 1)[:, :, None]
