"""The exact near field of Nyström attention: the keys that each block of queries sees as they are.

They are those of the block itself, of its neighbours and, where asked for, of blocks chosen for it. Machine code of our
own sees them where they lie, together with the far field, in one softmax. Elsewhere the near part of all queries is
made by itself and merged with the far one.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
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
class SeenInPlace:
    """Of `query`, `key` and `value` (l, c, d), with the bias (c, l or more) of each key."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor
    chosen: Tensor | None  # (c, blocks, k)
    block: int
    scale: float

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        chosen: ChosenBlocks | None,
        blocks: TokenBlocks,
        scale: float,
    ) -> "SeenInPlace":
        index = None if chosen is None else torch.where(chosen.real, chosen.index, -1)
        return cls(query, key, value, bias, index, blocks.size, scale)

    def of_rows(self, query: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        keys = (self.key, self.value, self.bias, self.chosen)
        return near_attention(query, places, *keys, self.block, self.scale)

    def with_far(self, far: FarField, values: Tensor) -> Tensor:
        keys = (self.key, self.value, self.bias, self.chosen)
        return local_attention(self.query, *keys, far.key, values, far.bias[:, :, 0], self.block, self.scale)


@dataclass(frozen=True)
class SeenInParts:
    query: Tensor  # (g, c, s, d)
    near: tuple[Tensor, Tensor]  # attention of all queries to their near keys, and its log-sum-exp
    blocks: TokenBlocks
    scale: float

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        chosen: ChosenBlocks | None,
        blocks: TokenBlocks,
        scale: float,
    ) -> "SeenInParts":
        """Of `query` (g·s, c, d) and of `key` and `value` (s + g·s + s, c, d), with a margin of zeros at both ends."""
        s = blocks.size
        query = query.unflatten(0, (blocks.number, s)).transpose(1, 2)
        near = window_part(query, key, value, near_bias(bias, blocks), scale, s)
        if chosen is not None:
            near = merge_parts(near, chosen_part(query, key[s:-s], value[s:-s], bias, chosen, blocks, scale))
        return cls(query, near, blocks, scale)

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
