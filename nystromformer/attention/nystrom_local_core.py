"""What Nyström attention with an exact near field computes, once its input is checked.

A batch goes through `attend`, with its mask. Packed sequences go through `attend_to_sequences`, each alone but for the
fits of the far fields' values, which are made in one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor

from nystromformer.attention.chosen_blocks import choose_blocks, chosen_part
from nystromformer.attention.common import (
    at_least_float32,
    key_padding_mask,
    pad_head_dims,
    softmax_attention,
    zero_masked,
)
from nystromformer.attention.exact_below import check_exact_below, exact_where_short
from nystromformer.attention.nystrom_local_parts import (
    FarField,
    TokenBlocks,
    core_places,
    corrected_values,
    far_field,
    find_heavy_keys,
    key_bias,
    near_bias,
    pick,
    token_blocks,
)
from nystromformer.attention.partial_softmax import (
    MASKED,
    attention_with_lse,
    merge,
    merge_parts,
    shared_part,
    window_part,
)
from nystromformer.checks import check_at_least, check_number

SMALLEST_RIDGE = 1e-4
"""Less would leave the core singular to float32."""


@dataclass(frozen=True, kw_only=True)
class NystromLocalOptions:
    """How the softmax matrix is approximated. Checked when made."""

    num_landmarks: int = 64
    heavy_keys: int | None = None
    block_size: int = 32
    chosen_blocks: int = 0
    core_rows: int = 64
    ridge: float = 0.01
    exact_below: int | None = None

    def __post_init__(self) -> None:
        check_at_least("num_landmarks", self.num_landmarks, 1, "64 is usual")
        if self.heavy_keys is not None:
            check_at_least("heavy_keys", self.heavy_keys, 0)
        if self.num_heavy >= self.num_landmarks:
            raise ValueError(
                f"heavy_keys={self.heavy_keys} with num_landmarks={self.num_landmarks}: heavy keys are some of the "
                f"landmarks, so there must be fewer; a quarter is usual."
            )
        check_at_least("block_size", self.block_size, 1)
        check_at_least("chosen_blocks", self.chosen_blocks, 0)
        check_at_least("core_rows", self.core_rows, 1)
        check_number("ridge", self.ridge, SMALLEST_RIDGE, "0.01 is usual")
        check_exact_below(self.exact_below)

    @property
    def num_heavy(self) -> int:
        return self.num_landmarks // 4 if self.heavy_keys is None else self.heavy_keys

    @property
    def num_segments(self) -> int:
        return self.num_landmarks - self.num_heavy

    @property
    def exact_up_to(self) -> int:
        """The number of valid tokens up to which nothing is approximated."""
        seen_as_they_are = (2 + self.chosen_blocks) * self.block_size
        return max(self.num_segments, self.num_heavy, seen_as_they_are, self.exact_below or 0)


class NystromLocalKeywords(TypedDict, total=False):
    """The same as keywords of functions."""

    num_landmarks: int
    heavy_keys: int | None
    block_size: int
    chosen_blocks: int
    core_rows: int
    ridge: float
    exact_below: int | None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, options: NystromLocalOptions
) -> Tensor:
    # One graph for all lengths is exported: no decision may rest on a length.
    if not torch.compiler.is_exporting() and (query.shape[2] <= options.exact_up_to or query.shape[0] == 0):
        query, key, value = (zero_masked(x, mask) for x in (query, key, value))
        return softmax_attention(query, key, value, key_padding_mask(mask), scale)
    fields = Fields.of(query, key, value, mask, scale, options)
    out = fields.attend(corrected_values(*fields.fit, options.ridge))[..., : value.shape[3]]
    if options.exact_below is None:
        return out
    query, key, value = (zero_masked(x, mask) for x in (query, key, value))
    return exact_where_short(out, query, key, value, mask, mask, scale, options.exact_below)


def attend_to_sequences(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    scale: float,
    options: NystromLocalOptions,
) -> list[Tensor]:
    """`attend` of each (1, h, l, d) alone, of lengths that may all differ."""
    heads = queries[0].shape[1]
    outs: dict[int, Tensor] = {}
    approximated: dict[int, Fields] = {}
    for i, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
        if query.shape[2] <= options.exact_up_to:
            outs[i] = softmax_attention(query, key, value, None, scale)
        else:
            approximated[i] = Fields.of(query, key, value, None, scale, options)
    if approximated:
        of_all: Any = zip(*(each.fit for each in approximated.values()), strict=True)
        exact, near_out, near_logsumexp, far_logits, far_value = (torch.cat(of_each) for of_each in of_all)
        fitted = corrected_values(exact, near_out, near_logsumexp, far_logits, far_value, options.ridge)
        for (i, fields), W in zip(approximated.items(), fitted.split(heads), strict=True):
            outs[i] = fields.attend(W)[..., : values[i].shape[3]]
    return [outs[i] for i in range(len(queries))]


@dataclass(frozen=True)
class Fields:
    """The near and the far field of a batch, arranged by `TokenBlocks`, before the values of the far one are known."""

    blocks: TokenBlocks
    in_blocks: Tensor  # queries (g, c, s, d)
    near: tuple[Tensor, Tensor]  # attention of all queries to their near keys, and its log-sum-exp
    far: FarField
    fit: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # what `corrected_values` takes
    scale: float

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        options: NystromLocalOptions,
    ) -> "Fields":
        s, wide = options.block_size, at_least_float32(query.dtype)
        blocks = token_blocks(query, mask, s, least=max(options.num_heavy, s * options.chosen_blocks))
        widths = zip(pad_head_dims(query, key, value), (0, s, s), strict=True)
        query, key, value = (blocks.arrange(x, margin) for x, margin in widths)  # (l c d), twice (s + l + s, c, d)
        with_margins = key, value
        in_blocks = query.unflatten(0, (blocks.number, s)).transpose(1, 2)  # (g c s d)
        key, value = key[s:-s], value[s:-s]
        present = key_bias(blocks, wide)

        rows = core_places(blocks, options.core_rows)
        core_query = pick(query, rows)  # (c r d)
        BV, logsumexp = attention_with_lse(
            core_query[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], present[None, :, None], scale
        )
        heavy = find_heavy_keys(core_query, logsumexp[0], key, scale, blocks, options.num_heavy)
        not_heavy = present.scatter(1, heavy.place, MASKED)
        # The near part of all queries needs no core: the core rows only pick theirs from it.
        near = window_part(in_blocks, *with_margins, near_bias(not_heavy, blocks), scale, s)
        chosen = None
        if options.chosen_blocks:
            chosen = choose_blocks(query, key, heavy, blocks, scale, options.chosen_blocks)
            near = merge_parts(near, chosen_part(in_blocks, key, value, not_heavy, chosen, blocks, scale))
        far = far_field(key, value, heavy, blocks, options.num_segments, chosen)
        near_out, near_logsumexp = (pick(x.transpose(1, 2).flatten(0, 1), rows) for x in near)
        far_logits = scale * core_query.to(wide) @ far.key.mT + pick(far.bias[:, :, 0], rows // s)  # (c r m)
        fit = BV[0].to(wide), near_out.to(wide), near_logsumexp, far_logits, far.value
        return cls(blocks, in_blocks, near, far, fit, scale)

    def attend(self, W: Tensor) -> Tensor:
        """(b, h, n, e), with the values `W` (c, m, e) of the far field."""
        dtype = self.in_blocks.dtype
        far = shared_part(self.in_blocks, self.far.key.to(dtype), W.to(dtype), self.far.bias, self.scale)
        return self.blocks.restore(merge(self.near, far).transpose(1, 2).flatten(0, 1))
