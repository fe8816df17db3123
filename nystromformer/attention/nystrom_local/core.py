"""What Nyström attention with an exact near field computes, once its input is checked.

A batch goes through `attend`, with its mask. Packed sequences go through `attend_to_sequences`, each alone but for the
fits of the far fields' values, which are made in one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor

from nystromformer.attention.native import Core, fields_attention, ridge_values_kept, wants_gradient
from nystromformer.attention.nystrom_local.near_field import (
    NearField,
    SeenInParts,
    SeenInPlace,
    Sequences,
    choose_blocks,
    sees_in_place,
)
from nystromformer.attention.nystrom_local.parts import (
    FarField,
    HeavyKeys,
    TokenBlocks,
    core_places,
    corrected_values,
    far_field,
    find_heavy_keys,
    key_bias,
    token_blocks,
)
from nystromformer.attention.shared.common import (
    at_least_float32,
    check_exact_below,
    exact_if_short,
    exact_where_short,
    is_readable,
    key_padding_mask,
    pad_head_dims,
    softmax_attention,
    zero_masked,
)
from nystromformer.attention.shared.partial_softmax import MASKED, attention_with_lse
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
    if options.exact_below is not None and mask is not None and is_readable(mask):
        approximate = partial(_approximated, scale=scale, options=options)
        return exact_if_short(approximate, query, key, value, mask, scale, options.exact_up_to)
    out = _approximated(query, key, value, mask, scale, options)
    if options.exact_below is None:
        return out
    query, key, value = (zero_masked(x, mask) for x in (query, key, value))
    return exact_where_short(out, query, key, value, mask, mask, scale, options.exact_below)


def _approximated(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, options: NystromLocalOptions
) -> Tensor:
    tokens = Arranged.of(query, key, value, mask, options)
    if tokens.in_place and tokens.needs_gradients and not torch.compiler.is_compiling():
        out = tokens.blocks.restore(_with_one_backward(tokens, scale, options))
    else:
        fields = Fields.of(tokens, scale, options)
        out = fields.attend(corrected_values(*fields.fit, options.ridge))
    return out[..., : value.shape[3]]


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
            approximated[i] = Fields.of(Arranged.of(query, key, value, None, options), scale, options)
    if approximated:
        of_all: Any = zip(*(each.fit for each in approximated.values()), strict=True)
        exact, near_out, near_logsumexp, far_logits, far_value = (torch.cat(of_each) for of_each in of_all)
        fitted = corrected_values(exact, near_out, near_logsumexp, far_logits, far_value, options.ridge)
        for (i, fields), W in zip(approximated.items(), fitted.split(heads), strict=True):
            outs[i] = fields.attend(W)[..., : values[i].shape[3]]
    return [outs[i] for i in range(len(queries))]


def _with_one_backward(tokens: "Arranged", scale: float, options: NystromLocalOptions) -> Tensor:
    """The same (l, c, e) with a backward of its own, which adds up large gradients where they lie."""
    with torch.no_grad():
        fields = Fields.of(tokens, scale, options)
        exact, near_out, near_logsumexp, logits, far_value = fields.fit
        W, kept = ridge_values_kept(*fields.fit, options.ridge)
    blocks, near = tokens.blocks, fields.near
    assert isinstance(near, SeenInPlace)
    chosen = near.keys[3]
    core = Core(
        query=fields.core_query,
        places=fields.rows,
        head=blocks.head,
        bias=key_bias(blocks, exact.dtype),
        exact=(exact, fields.logsumexp),
        near=(near_out, near_logsumexp),
        logits=logits,
        far_value=far_value,
        kept=kept,
        heavy=(blocks.valid, fields.heavy.place, fields.heavy.real, chosen, options.num_segments, blocks.size,
               blocks.number),
        ridge=options.ridge,
    )  # fmt: skip
    of_keys = tokens.query, tokens.key, tokens.value, near.keys[2], chosen
    return fields_attention(core, *of_keys, fields.far.key, W, fields.far.bias[:, :, 0], blocks.size, scale)


@dataclass(frozen=True)
class Arranged:
    """Queries, keys and values as `TokenBlocks` arranges them, (l, c, d)."""

    blocks: TokenBlocks
    query: Tensor
    key: Tensor  # with a margin of a block of zeros at both ends, unless `in_place`
    value: Tensor  # the same
    in_place: bool

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: NystromLocalOptions
    ) -> "Arranged":
        s = options.block_size
        blocks = token_blocks(query, mask, s, least=max(options.num_heavy, s * options.chosen_blocks))
        query, key, value = pad_head_dims(query, key, value)
        in_place = sees_in_place(blocks, query, key, value)
        margin, fill = (0, False) if in_place else (s, True)
        arranged = (blocks.arrange(query, fill=fill), blocks.arrange(key, margin, fill))
        return cls(blocks, *arranged, blocks.arrange(value, margin, fill), in_place)

    @property
    def needs_gradients(self) -> bool:
        return wants_gradient(self.query, self.key, self.value)


@dataclass(frozen=True)
class Fields:
    """The near and the far field of a batch, arranged by `TokenBlocks`, before the values of the far one are known."""

    blocks: TokenBlocks
    rows: Tensor  # (c, r): the places of the core rows
    core_query: Tensor  # (c, r, d)
    logsumexp: Tensor  # (c, r): of their exact softmax
    heavy: HeavyKeys
    near: NearField
    far: FarField
    fit: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # what `corrected_values` takes

    @classmethod
    def of(cls, tokens: Arranged, scale: float, options: NystromLocalOptions) -> "Fields":
        s, blocks, query, wide = options.block_size, tokens.blocks, tokens.query, at_least_float32(tokens.query.dtype)
        margin = 0 if tokens.in_place else s
        key, value = (x[margin : x.shape[0] - margin] for x in (tokens.key, tokens.value))
        present = key_bias(blocks, wide)

        rows = core_places(blocks, options.core_rows)
        core_query = blocks.pick(query, rows)  # (c r d)
        bias = present[None, :, None, : key.shape[0]]
        BV, logsumexp = attention_with_lse(
            core_query[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None], bias, scale
        )
        heavy = find_heavy_keys(core_query, logsumexp[0], key, scale, blocks, options.num_heavy)
        not_heavy = present.scatter(1, heavy.place, MASKED)
        chosen = None
        if options.chosen_blocks:
            chosen = choose_blocks(query, key, heavy, blocks, scale, options.chosen_blocks)
        sequences = Sequences(query, tokens.key, tokens.value, not_heavy, chosen, blocks, scale)
        near: NearField = SeenInPlace.of(sequences) if tokens.in_place else SeenInParts.of(sequences)
        far = far_field(key, value, heavy, blocks, options.num_segments, chosen)
        near_out, near_logsumexp = near.of_rows(core_query, rows)
        far_bias = blocks.pick(far.bias[:, :, 0], rows // s)  # (c r m)
        far_logits = torch.baddbmm(far_bias, core_query.to(wide), far.key.mT, alpha=scale)
        fit = BV[0].to(wide), near_out.to(wide), near_logsumexp, far_logits, far.value
        return cls(blocks, rows, core_query, logsumexp[0], heavy, near, far, fit)

    def attend(self, W: Tensor) -> Tensor:
        """(b, h, n, e), with the values `W` (c, m, e) of the far field."""
        return self.blocks.restore(self.near.with_far(self.far, W))
