"""The parts of Nyström attention with an exact near field: tokens in blocks, heavy keys, far field, ridge core.

Inside, the sequence comes first, and examples and heads share one axis: (l, c, d) with c = b·h. For one example that is
the memory layout (b, n, h·d) of projections; for any number, blocks, windows and shared landmarks are views of it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nystromformer.attention.native import column_sums, far_means, ridge_values, runs_native
from nystromformer.attention.nystrom.landmarks import segments_of_ranks
from nystromformer.attention.shared.common import at_least_float32
from nystromformer.attention.shared.partial_softmax import MASKED

SMALLEST_GRAM = 1e-6
"""Added to the mean diagonal of AᵀA: where core rows put all their weight on near keys, there is nothing to fit."""

KEYS_AT_ONCE = 512
"""Keys whose column sums are taken together: enough for a fast product, few enough to stay in a cache."""


@dataclass(frozen=True)
class TokenBlocks:
    """The valid tokens of each example, moved to the front and divided into blocks. Zeros fill the last blocks up.

    Counting blocks over valid tokens is what makes results independent of where and how much padding there is.
    """

    heads: int
    head: Tensor  # (c, 1): 0, 1, …
    length: int
    size: int  # places in a block
    number: int  # blocks of each example
    valid: Tensor  # (b,): valid tokens of each example
    places: Tensor  # (number·size,): 0, 1, …
    present: Tensor  # (b, number·size): the places that hold a token
    source: Tensor | None  # (number·size, b): which of the b·n tokens each place holds; None where none has to move
    place: Tensor | None  # (b, n): where each token went

    @property
    def batch(self) -> int:
        return self.valid.shape[0]

    def for_heads(self, x: Tensor) -> Tensor:
        """`x` (b, ...) repeated for each head: (c, ...), a view for one example."""
        return x[:, None].expand(-1, self.heads, *x.shape[1:]).flatten(0, 1)

    def pick(self, x: Tensor, places: Tensor) -> Tensor:
        """What `x` (l, c, ...) has in `places` (c, k), other ones for each c: (c, k, ...)."""
        return x[places, self.head]

    def arrange(self, x: Tensor, margin: int = 0, fill: bool = True) -> Tensor:
        """(b, h, n, d) → (number·size + 2·margin, c, d), with `margin` rows of zeros at both ends.

        Without `fill` the last block need not be filled up where no token has to move: (n, c, d), a view if possible.
        """
        if self.source is None:
            rows = x.permute(2, 0, 1, 3).flatten(1, 2)  # (n c d)
            if not fill:
                return rows
            after = self.number * self.size - self.length + margin
            if not torch.compiler.is_compiling() and margin == after == 0:
                return rows
            zeros = rows.new_zeros(margin + after, *rows.shape[1:])
            return torch.cat((zeros[:margin], rows, zeros[margin:]))  # faster than padding, which writes all twice
        rows = x.transpose(1, 2).flatten(2).flatten(0, 1)  # (b·n h·d)
        place = torch.arange(-margin, self.number * self.size + margin, device=x.device)[:, None]
        absent = (place < 0) | (place >= self.valid)  # (l b)
        source = functional.pad(self.source, (0, 0, margin, margin))
        moved = rows.index_select(0, source.flatten()).masked_fill_(absent.flatten()[:, None], 0)
        return moved.view(-1, self.batch * self.heads, x.shape[3])

    def restore(self, x: Tensor) -> Tensor:
        """(number·size, c, d) → (b, h, n, d), each token back in its place; what stands at padding has no meaning."""
        if self.place is None:
            return x[: self.length].unflatten(1, (self.batch, self.heads)).permute(1, 2, 0, 3)
        example = torch.arange(self.batch, device=x.device)[:, None]
        rows = x.reshape(-1, self.heads * x.shape[2])  # (number·size·b h·d)
        moved = rows.index_select(0, (self.place * self.batch + example).flatten())
        return moved.view(self.batch, self.length, self.heads, x.shape[2]).transpose(1, 2)


def token_blocks(tokens: Tensor, mask: Tensor | None, size: int, least: int = 1) -> TokenBlocks:
    """Blocks of `size` places for `tokens` (b, h, n, d) with `mask` (b, n). `least` tokens there must be or, in an
    exported graph for all lengths, are made room for.

    >>> tokens = torch.tensor([7.0, 8.0, 9.0]).view(1, 1, 3, 1)
    >>> token_blocks(tokens, torch.tensor([[False, True, True]]), size=2).arrange(tokens).flatten()
    tensor([8., 9., 0., 0.])
    """
    batch, heads, length, _ = tokens.shape
    number = (length + size - 1) // size
    if torch.compiler.is_exporting():
        number = torch.sym_max(number, max((least + size - 1) // size, 2))  # a single block would be a special case
        mask = tokens.new_ones(batch, length, dtype=torch.bool) if mask is None else mask
    places = torch.arange(number * size, device=tokens.device)
    head = torch.arange(batch * heads, device=tokens.device)[:, None]
    if mask is None:
        valid = torch.full((batch,), length, device=tokens.device)
        return TokenBlocks(heads, head, length, size, number, valid, places, places < valid[:, None], None, None)
    rank = mask.long().cumsum(dim=1) - 1
    row = torch.arange(batch * length, device=tokens.device).view(batch, length)
    # Padding all goes to one place more, which is cut off again.
    target = torch.where(mask, rank, number * size)
    source = row.new_zeros(batch, number * size + 1).scatter(1, target, row)[:, :-1]
    valid = mask.sum(dim=1)
    present = places < valid[:, None]
    return TokenBlocks(heads, head, length, size, number, valid, places, present, source.T, rank.clamp(min=0))


def core_places(blocks: TokenBlocks, number: int) -> Tensor:
    """The places (c, r) in the middle of `number` equal stretches of valid tokens; some twice where there are fewer."""
    middles = torch.arange(1, 2 * number, 2, device=blocks.valid.device)
    return blocks.for_heads(middles * blocks.valid[:, None] // (2 * number))


@dataclass(frozen=True)
class HeavyKeys:
    place: Tensor  # (c, h)
    real: Tensor  # (c, h): false where an example has fewer valid tokens than h
    column_sums: Tensor  # (c, l): of B, by which they were found


@torch.no_grad()
def find_heavy_keys(
    query: Tensor, logsumexp: Tensor, key: Tensor, scale: float, blocks: TokenBlocks, number: int
) -> HeavyKeys:
    """The `number` keys with the largest column sums of B = softmax(query keyᵀ); of equal ones the first.

    `query` is (c, r, d), `key` (l, c, d), `logsumexp` (c, r) that of the rows of B. A few columns exist at a time.
    """
    places = blocks.number * blocks.size
    if runs_native(query, logsumexp, key):
        sums = column_sums(query, logsumexp, key, scale, places)
    else:
        sums = _column_sums(query, logsumexp, key, scale)
    present = blocks.for_heads(blocks.present)
    order = torch.where(present, ranked(sums.float(), blocks.places, places), -places - blocks.places)
    chosen = order.topk(number, dim=1).indices
    return HeavyKeys(chosen, present.gather(1, chosen), sums)


def _column_sums(query: Tensor, logsumexp: Tensor, key: Tensor, scale: float) -> Tensor:
    """(c, l)."""
    wide = logsumexp.dtype
    query, shift = query.to(wide), logsumexp[..., None]
    key = key.transpose(0, 1)  # (c l d)
    # A compiled graph has no loop whose length depends on the input's.
    parts = [key] if torch.compiler.is_compiling() else key.split(KEYS_AT_ONCE, dim=1)
    logits = (torch.baddbmm(shift, query, part.to(wide).mT, beta=-1, alpha=scale) for part in parts)
    sums = [each.exp_().sum(1) for each in logits]
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)


def ranked(sums: Tensor, place: Tensor, places: int) -> Tensor:
    """Numbers in the order of `sums` (c, l) >= 0 of which no two are equal: of equal sums the one of the lowest `place`
    < `places` has the largest.

    So a choice does not depend on how top-k breaks ties, which changes with the number of candidates.
    """
    if torch.compiler.is_exporting():  # ONNX can't read the bits of a number; a wider one has room for the place
        return sums.double() * (1 - place.double() * 2.0**-50) - place.double() * 2.0**-1000
    # Positive floats are ordered as their bits, and the place makes further digits.
    return sums.view(torch.int32).long() * places - place


@dataclass(frozen=True)
class ChosenBlocks:
    """Blocks of keys that each block of queries sees as they are, beside its neighbors."""

    index: Tensor  # (c, g, k)
    real: Tensor  # (c, g, k): false where there are fewer such blocks than k

    @property
    def index_or_none(self) -> Tensor:
        """`index`, or -1 where there is none, as machine code takes it."""
        return torch.where(self.real, self.index, -1)


@dataclass(frozen=True)
class FarField:
    """What stands for the keys that are not near: means of segments, then heavy keys. At least float32."""

    key: Tensor  # (c, m, d)
    value: Tensor  # (c, m, e)
    bias: Tensor  # (number, c, 1, m): log of how many keys each stands for, seen from each block


def far_field(
    key: Tensor,
    value: Tensor,
    heavy: HeavyKeys,
    blocks: TokenBlocks,
    num_segments: int,
    chosen: ChosenBlocks | None = None,
) -> FarField:
    """The far field of `key` and `value` (number·size, c, d). Heads share segments; each takes its heavy keys out."""
    if runs_native(key, value):
        chosen_index = None if chosen is None else chosen.index_or_none
        sizes = num_segments, blocks.size, blocks.number
        far_key, far_value, bias = far_means(key, value, blocks.valid, heavy.place, heavy.real, chosen_index, *sizes)
        return FarField(far_key, far_value, bias[:, :, None])
    wide = at_least_float32(key.dtype)
    divided = segments_of_ranks(blocks.places.expand(blocks.batch, -1), blocks.valid, num_segments)
    segment = blocks.for_heads(divided.index).gather(1, heavy.place)  # (c h)
    belongs = segment[..., None] == torch.arange(num_segments, device=key.device)
    belongs = (belongs & heavy.real[..., None]).to(wide)  # (c h m-h)
    counts = (blocks.for_heads(divided.counts) - belongs.sum(1)).clamp(min=1)[..., None]  # (c m-h 1)
    target = (divided.index.T * blocks.batch + torch.arange(blocks.batch, device=key.device)).flatten()  # (l·b)
    target = target[: key.shape[0] * blocks.batch]

    def means_then_heavy(x: Tensor) -> Tensor:
        rows = x.reshape(-1, blocks.heads * x.shape[2]).to(wide)  # (l·b h·d)
        sums = rows.new_zeros(num_segments * blocks.batch, rows.shape[1]).index_add(0, target, rows)
        sums = sums.view(num_segments, -1, x.shape[2]).transpose(0, 1)  # (c m-h d)
        heavy_rows = blocks.pick(x, heavy.place).to(wide)  # (c h d)
        return torch.cat((torch.baddbmm(sums, belongs.mT, heavy_rows, alpha=-1) / counts, heavy_rows), dim=1)

    bias = _far_bias(divided.counts, belongs, heavy, blocks, chosen)
    return FarField(means_then_heavy(key), means_then_heavy(value), bias)


def _far_bias(
    counts: Tensor, belongs: Tensor, heavy: HeavyKeys, blocks: TokenBlocks, chosen: ChosenBlocks | None
) -> Tensor:
    """log(c − w) for each block and segment, 0 for heavy keys, `MASKED` for what is empty: (number, c, 1, m)."""
    first = blocks.places[:: blocks.size, None]  # places of the blocks (number 1)
    begin, end = first - blocks.size, first + 2 * blocks.size  # of what each sees
    counts = counts[:, None]  # (b 1 m-h)
    last = counts.cumsum(2)

    def tokens_between(begin: Tensor, end: Tensor) -> Tensor:
        """How many tokens of each segment have such places: (b number m-h)."""
        return (torch.minimum(last, end) - torch.maximum(last - counts, begin)).clamp(min=0)

    place = heavy.place[:, None]  # (c 1 h)
    heavy_far = (place < begin) | (place >= end)  # (c number h)
    far = blocks.for_heads(counts - tokens_between(begin, end))  # (c number m-h)
    if chosen is not None:
        in_block = blocks.for_heads(tokens_between(first, first + blocks.size))
        far = far - (in_block[blocks.head[..., None], chosen.index] * chosen.real[..., None]).sum(2)
        heavy_block = heavy.place[:, None, None] // blocks.size  # (c 1 1 h)
        is_chosen = (chosen.index[..., None] == heavy_block) & chosen.real[..., None]  # (c number k h)
        heavy_far = heavy_far & ~is_chosen.any(2)
    far = far - heavy_far.to(belongs.dtype) @ belongs
    of_segments = far.log().clamp(min=MASKED)  # that of 0 is -∞
    of_heavy = _masked(~heavy.real, far.dtype)[:, None].expand(-1, blocks.number, -1)
    return torch.cat((of_segments, of_heavy), dim=2).transpose(0, 1)[:, :, None]


def key_bias(blocks: TokenBlocks, dtype: torch.dtype) -> Tensor:
    """0 for each place with a token, `MASKED` for others: (c, number·size)."""
    return blocks.for_heads(_masked(~blocks.present, dtype))


def _masked(absent: Tensor, dtype: torch.dtype) -> Tensor:
    return absent.to(dtype) * MASKED


def corrected_values(
    exact: Tensor, near_out: Tensor, near_logsumexp: Tensor, far_logits: Tensor, far_value: Tensor, ridge: float
) -> Tensor:
    """W (c, m, e): values of the far field with which the core rows come out as near to `exact` as the ridge allows.

    Of r core rows: `exact` (c, r, e) is B V; `near_out` (c, r, e) and `near_logsumexp` (c, r) come from their near
    keys; `far_logits` (c, r, m) are those of the far field, whose own values are `far_value` (c, m, e).
    """
    if runs_native(exact, near_out, near_logsumexp, far_logits, far_value):
        return ridge_values(exact, near_out, near_logsumexp, far_logits, far_value, ridge)
    total = torch.logaddexp(near_logsumexp, far_logits.logsumexp(-1))[..., None]  # (c r 1)
    A = torch.exp(far_logits - total)  # (c r m)
    share = torch.exp(near_logsumexp[..., None] - total)
    R = torch.baddbmm(torch.addcmul(exact, share, near_out, value=-1), A, far_value, alpha=-1)  # (c r e)
    gram = A.mT @ A  # (c m m)
    size = ridge * (gram.diagonal(dim1=1, dim2=2).mean(1) + SMALLEST_GRAM)
    identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    condition = gram.shape[1] / ridge + 1
    return far_value + _solved(gram + size[:, None, None] * identity, A.mT @ R, condition)


def _solved(matrix: Tensor, right: Tensor, condition: float) -> Tensor:
    """X of matrix X = right, for symmetric positive definite (c, m, m) of at most this condition number."""
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        return _newton_inverse(matrix, condition) @ right  # ONNX has no Cholesky factor
    # The bound means that there is a factor. Not checking that avoids waiting for the device, and an error for a whole
    # batch because one example holds NaN.
    factor, _ = torch.linalg.cholesky_ex(matrix)
    return torch.cholesky_solve(right, factor)


def _newton_inverse(matrix: Tensor, condition: float) -> Tensor:
    """By Z ← Z (3I − MZ (3I − MZ)) from Z = I / ‖M‖∞, where each step multiplies what is small by 3 and cubes errors.

    ‖M‖∞ is at most √m times the largest eigenvalue.
    """
    identity = torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    inverse = identity / matrix.abs().sum(2).amax(1)[:, None, None]
    for _ in range(math.ceil(math.log(condition * matrix.shape[1] ** 0.5, 3)) + 4):
        product = matrix @ inverse
        inverse = inverse @ (3 * identity - product @ (3 * identity - product))
    return inverse
