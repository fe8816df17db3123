"""`exact_below`: short examples in a batch of long ones are computed exactly.

An approximation of few tokens saves nothing. So examples with at most e valid tokens, queries and keys alike, can be
computed exactly: their tokens are moved to the front, attended to among e places, and moved back. Every example goes
through both ways, and a flag for each chooses. So nothing has a shape that depends on what the masks hold, and the
whole can be compiled, exported and mapped; it costs one exact attention over e tokens per example.
"""

import torch
from torch import Tensor

from nystromformer.attention.common import all_valid, key_padding_mask, softmax_attention
from nystromformer.checks import check_at_least


def check_exact_below(given: int | None) -> None:
    if given is not None:
        check_at_least("exact_below", given, 1, "None leaves it to the attention itself")


def all_are_short(query: Tensor, key: Tensor, exact_below: int | None) -> bool:
    """Whether every example surely is exact, by the lengths (b, h, n, d) and (b, h, s, d) alone."""
    return exact_below is not None and query.shape[2] <= exact_below and key.shape[2] <= exact_below


def exact_where_short(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    exact_below: int | None,
) -> Tensor:
    """`out` (b, h, n, e) with the rows of short examples replaced by exact ones. Masked rows must be zero already."""
    if exact_below is None or not _some_may_be_short(query, key, query_mask, key_mask, exact_below):
        return out
    queries = _Front(query, query_mask, exact_below)
    keys = queries if key_mask is query_mask and key_mask is not None else _Front(key, key_mask, exact_below)
    exact = softmax_attention(
        queries.gather(query), keys.gather(key), keys.gather(value), key_padding_mask(keys.present), scale
    )
    short = (queries.valid <= exact_below) & (keys.valid <= exact_below)
    return torch.where(short[:, None, None, None], queries.scatter(exact), out)


def short_examples(
    query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, exact_below: int | None
) -> Tensor:
    """Which examples are short: (b,)."""
    if exact_below is None:
        return torch.zeros(query.shape[0], dtype=torch.bool, device=query.device)
    counts = (
        (all_valid(tokens) if mask is None else mask).sum(dim=1)
        for tokens, mask in ((query, query_mask), (key, key_mask))
    )
    return torch.stack([count <= exact_below for count in counts]).all(dim=0)


def _some_may_be_short(
    query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, exact_below: int
) -> bool:
    if torch.compiler.is_exporting():  # one graph for all lengths: no decision may rest on a length
        return True
    return all(
        mask is not None or tokens.shape[2] <= exact_below for tokens, mask in ((query, query_mask), (key, key_mask))
    )


class _Front:
    """The first `places` valid tokens of each example, moved to the front."""

    def __init__(self, tokens: Tensor, mask: Tensor | None, places: int) -> None:
        mask = all_valid(tokens) if mask is None else mask
        batch, length = mask.shape
        rank = mask.long().cumsum(dim=1) - 1
        # Padding and tokens beyond the places all go to one place more, which is cut off again.
        target = torch.where(mask & (rank < places), rank, places)
        source = torch.arange(length, device=mask.device).expand(batch, length)
        self.source = source.new_zeros(batch, places + 1).scatter(1, target, source)[:, :-1]  # (b e)
        self.place = rank.clamp(0, places - 1)  # (b n)
        self.valid = mask.sum(dim=1)
        self.present = torch.arange(places, device=mask.device) < self.valid[:, None]  # (b e)

    def gather(self, x: Tensor) -> Tensor:
        """(b, h, n, d) → (b, h, places, d), 0 where there is no token."""
        moved = x.gather(2, self.source[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
        return moved.masked_fill(~self.present[:, None, :, None], 0)

    def scatter(self, x: Tensor) -> Tensor:
        """(b, h, places, d) → (b, h, n, d), each token back in its place; what stands elsewhere has no meaning."""
        return x.gather(2, self.place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
