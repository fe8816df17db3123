"""Reformer: tokens sorted by a hash of their query attend to their neighbors in that order (Kitaev et al., 2020)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nystromformer.attention.base import Attention, Length
from nystromformer.attention.shared.common import (
    all_valid,
    at_least_float32,
    check_floating,
    check_self_attention,
    full_precision,
    shape_of,
    zero_masked,
)
from nystromformer.checks import check_at_least

NUM_DIRECTIONS = 64
"""Random directions of a hash: 128 buckets by one hash, up to 4096 by two of half the directions each. A fixed number,
so that the random numbers drawn, and with them the result, depend neither on the batch nor on its padding."""
MAX_BUCKET_BITS = 12
SELF_LOGIT = -1e5
"""Low enough that a token attends to itself only when nothing else is there, as in the paper."""


def hash_factors(counts: Tensor, bucket_size: int) -> tuple[Tensor, Tensor]:
    """The numbers of buckets of the two hashes for examples with `counts` valid tokens; their product is the total.

    2 n / bucket_size buckets as the paper recommends, rounded down to a power of two; too many for one hash are split.

    >>> hash_factors(torch.tensor([10, 100, 4096, 16384]), bucket_size=64)
    (tensor([  1,   2, 128,  16]), tensor([ 1,  1,  1, 32]))
    """
    wanted = 2 * (counts // bucket_size)
    bits = (torch.frexp(wanted.double()).exponent.long() - 1).clamp(0, MAX_BUCKET_BITS)  # ⌊log₂⌋
    first = torch.where(2**bits <= 2 * NUM_DIRECTIONS, bits, bits // 2)
    return 2**first, 2 ** (bits - first)


def angular_hash(rotated: Tensor, start: Tensor, buckets: Tensor) -> Tensor:
    """The nearest of `buckets` directions ±r: the buckets / 2 from `start` on of `rotated` (b, h, n, directions)."""
    direction = torch.arange(rotated.shape[-1], device=rotated.device)
    start, stop = (x.view(-1, 1, 1, 1) for x in (start, start + buckets // 2))
    used = (direction >= start) & (direction < stop)  # (b 1 1 directions)
    nearest = (rotated.abs() * used).argmax(dim=-1, keepdim=True)  # (b h n 1)
    negative = rotated.gather(-1, nearest) < 0
    bucket = (nearest - start).clamp(min=0) + negative * (stop - start)
    return (bucket * (stop > start)).squeeze(-1)


@torch.no_grad()
def hash_order(query: Tensor, directions: Tensor, mask: Tensor, counts: Tensor, bucket_size: int) -> Tensor:
    """The tokens of each example sorted by bucket, then by position, padding last: indices (b, h, n)."""
    rotated = query @ directions  # (b h n directions)
    first, second = hash_factors(counts, bucket_size)
    bucket = angular_hash(rotated, torch.zeros_like(first), first)  # (b h n)
    if query.shape[2] // bucket_size > NUM_DIRECTIONS:
        bucket += first.view(-1, 1, 1) * angular_hash(rotated, first // 2, second)
    return bucket.masked_fill(~mask.unsqueeze(1), 2**MAX_BUCKET_BITS).argsort(dim=-1, stable=True)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """`x` (b, h, n, d) in the order of `index` (b, h, n). Rows of one flat matrix: `gather` takes 18 times as long.

    >>> take_rows(torch.tensor([[[[1.0], [2.0], [3.0]]]]), torch.tensor([[[2, 0, 1]]])).flatten()
    tensor([3., 1., 2.])
    """
    first = torch.arange(0, index.numel(), index.shape[2], device=x.device).view(*index.shape[:2], 1)
    return x.reshape(-1, x.shape[3]).index_select(0, (index + first).flatten()).view(*index.shape, x.shape[3])


def chunk_before(chunks: Tensor, last: Tensor) -> Tensor:
    """For each chunk of (b, h, c, s, d) the one before it; before the first comes the `last` (b) with valid tokens.

    This wrap-around keeps to one hash round and to valid tokens, so that up to 2 s tokens attend exactly. (Transformers
    wraps from the first chunk of a round to the last one of the round before, be it padding or not.)
    """
    index = last.view(-1, 1, 1, 1, 1).expand_as(chunks[:, :, :1])
    return torch.cat((chunks.gather(2, index), chunks[:, :, :-1]), dim=2)


def chunk_biases(counts: Tensor, last: Tensor, num_chunks: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What to add to the logits of the chunk before, (b, 1, c, 1, s), and of the own, (b, 1, c, s, s).

    Valid tokens come first in the order, so a place in it is valid when it is below the count.
    """
    chunk = torch.arange(num_chunks, device=counts.device).unsqueeze(1)  # (c 1)
    place = torch.arange(size, device=counts.device)  # (s)
    counts, last = counts.view(-1, 1, 1), last.view(-1, 1, 1)
    before = torch.where(chunk == 0, last, chunk - 1)  # (b c 1)
    # the chunk before an only chunk is itself, and must not count twice
    seen_before = (before * size + place < counts) & (before != chunk)  # (b c s)
    seen = (chunk * size + place < counts).unsqueeze(2)  # (b c 1 s)
    zero = torch.zeros((), dtype=dtype, device=counts.device)
    itself = place.unsqueeze(1) == place
    own = torch.where(seen, zero, -torch.inf).masked_fill(itself, SELF_LOGIT)  # (b c s s)
    return torch.where(seen_before, zero, -torch.inf)[:, None, :, None], own.unsqueeze(1)


def attend_in_chunks(
    query: Tensor, value: Tensor, order: Tensor, last: Tensor, biases: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """One hash round: Σ exp(logit - c) v (b, h, n, d), Σ exp(logit - c) and c, the largest logit (b, h, n, 1)."""
    size = biases[1].shape[-1]
    q, v = (take_rows(x, order).unflatten(2, (-1, size)) for x in (query, value))  # (b h c s d)
    # as Transformers: unit length, so that q . k needs no further scale
    k = q * ((q.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * q.shape[-1] ** -0.5)
    # two products rather than one with twice the keys: nothing is copied to put them side by side
    logits = [q @ chunk_before(k, last).mT, q @ k.mT]  # (b h c s s) each
    for part, bias in zip(logits, biases, strict=True):
        part += bias
    largest = torch.maximum(*(part.detach().amax(dim=-1, keepdim=True) for part in logits))
    before, own = (part.sub_(largest).exp_() for part in logits)
    numerator = (before @ chunk_before(v, last)).add_(own @ v)
    normalizer = before.sum(dim=-1, keepdim=True) + own.sum(dim=-1, keepdim=True)
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    inverse = torch.empty_like(order).scatter_(-1, order, place)
    numerator, normalizer, largest = (take_rows(x.flatten(2, 3), inverse) for x in (numerator, normalizer, largest))
    return numerator, normalizer, largest


def reformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    rotations: Tensor,
    bucket_size: int = 64,
) -> Tensor:
    """LSH attention on (b, h, n, d), `mask` (b, n) True for real tokens.

    `key` is ignored: the keys are the queries at unit length. It is there so that all attentions are called alike.
    `rotations` (r, h, d, directions) holds the random directions of r hash rounds. In each round a token sees its chunk
    of `bucket_size` tokens in the order of the hash and the chunk before; one softmax goes over all rounds.

    >>> x = torch.randn(2, 4, 1000, 8)
    >>> reformer_attention(x, x, x, rotations=torch.randn(2, 4, 8, 64)).shape
    torch.Size([2, 4, 1000, 8])
    """
    check_self_attention(query, key, value, mask)
    check_floating("rotations", rotations)
    heads, length, width = query.shape[1:]
    if rotations.dim() != 4 or rotations.shape[0] < 1 or rotations.shape[1:3] != (heads, width):
        raise ValueError(
            f"rotations has shape {shape_of(rotations)}: must be (rounds, {heads}, {width}, directions), as from "
            f"torch.randn(2, {heads}, {width}, {NUM_DIRECTIONS})."
        )
    check_at_least("bucket_size", bucket_size, 1, "64 is usual")
    padding = -length % bucket_size
    # exponentials, and a hash that rounding would change: never in half precision
    dtype = at_least_float32(value.dtype)
    with full_precision(value):
        q, v = (functional.pad(zero_masked(x, mask).to(dtype), (0, 0, 0, padding)) for x in (query, value))
        is_valid = functional.pad(all_valid(query) if mask is None else mask, (0, padding), value=False)
        counts = is_valid.sum(dim=1)
        last = ((counts - 1) // bucket_size).clamp(min=0)
        biases = chunk_biases(counts, last, is_valid.shape[1] // bucket_size, bucket_size, dtype)
        orders = (hash_order(q, directions.to(dtype), is_valid, counts, bucket_size) for directions in rotations)
        rounds = [attend_in_chunks(q, v, order, last, biases) for order in orders]
        numerators, normalizers, largest = zip(*rounds, strict=True)
        common = torch.stack(largest).amax(dim=0)  # (b h n 1)
        shares = [(each - common).exp() for each in largest]
        numerator = sum(x * share for x, share in zip(numerators, shares, strict=True))
        out = numerator / sum(x * share for x, share in zip(normalizers, shares, strict=True))
    return zero_masked(out[:, :, :length].to(value.dtype), mask)


class ReformerAttention(Attention):
    """`num_hashes`: rounds of hashing. `bucket_size`: tokens in a chunk. `key` is ignored: queries serve as keys.

    New hash directions are drawn from torch's generator in each forward, in training and in evaluation.
    """

    name = "reformer"
    operation = staticmethod(reformer_attention)
    has_map = False
    shares_query_key = True
    stochastic = True
    size_option = "num_hashes"

    def __init__(
        self, num_heads: int, head_dim: int, max_length: Length = None, *, num_hashes: int = 2, bucket_size: int = 64
    ) -> None:
        super().__init__(num_heads, head_dim, max_length)
        check_at_least("num_hashes", num_hashes, 1, "the paper uses 2")
        check_at_least("bucket_size", bucket_size, 1, "64 is usual")
        self.num_hashes, self.bucket_size = num_hashes, bucket_size

    def arguments(self, query: Tensor) -> dict[str, Any]:
        shape = (self.num_hashes, self.num_heads, self.head_dim, NUM_DIRECTIONS)
        return {"rotations": torch.randn(shape, device=query.device), "bucket_size": self.bucket_size}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_hashes={self.num_hashes}, bucket_size={self.bucket_size}"
