"""Reformer: tokens sorted by a hash of their query attend to their neighbours in that order (Kitaev et al., 2020)."""

import torch
from torch import Tensor
from torch.nn import functional

from nystromformer.attention.base import Attention
from nystromformer.attention.checks import check_at_least
from nystromformer.attention.masks import zero_padding

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
    one_hash = 2**bits <= 2 * NUM_DIRECTIONS
    first = torch.where(one_hash, bits, bits // 2)
    return 2**first, 2 ** (bits - first)


def angular_hash(rotated: Tensor, start: Tensor, buckets: Tensor) -> Tensor:
    """The nearest of `buckets` directions ±r: `rotated` (b, h, n, r, directions), of which buckets / 2 from `start`."""
    direction = torch.arange(rotated.shape[-1], device=rotated.device)
    start, stop = (x.view(-1, 1, 1, 1) for x in (start, start + buckets // 2))
    used = (direction >= start.unsqueeze(-1)) & (direction < stop.unsqueeze(-1))
    nearest = (rotated.abs() * used).argmax(dim=-1)  # (b h n r)
    negative = rotated.gather(-1, nearest.unsqueeze(-1)).squeeze(-1) < 0
    bucket = nearest - start + negative * (stop - start)
    return bucket.clamp(min=0) * (stop > start)


@torch.no_grad()
def hash_order(query: Tensor, rotations: Tensor, mask: Tensor, counts: Tensor, bucket_size: int) -> Tensor:
    """The tokens of each example sorted by bucket, then by position, padding last: indices (b, h, r, n)."""
    rotated = (query @ rotations.flatten(2)).unflatten(-1, rotations.shape[2:])  # (b h n r directions)
    first, second = hash_factors(counts, bucket_size)
    bucket = angular_hash(rotated, torch.zeros_like(first), first)  # (b h n r)
    if 2 * (query.shape[2] // bucket_size) > 2 * NUM_DIRECTIONS:
        bucket += first.view(-1, 1, 1, 1) * angular_hash(rotated, first // 2, second)
    bucket = bucket.masked_fill(~mask[:, None, :, None], 2**MAX_BUCKET_BITS)
    return bucket.transpose(2, 3).argsort(dim=-1, stable=True)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """`x` (..., n, d) at rows `index` (..., m). Whole rows of one flat matrix: `gather` takes 18 times as long."""
    shape, rows = x.shape, x.shape[-2]
    offset = rows * torch.arange(index[..., 0].numel(), device=x.device).view(*index.shape[:-1], 1)
    return x.reshape(-1, shape[-1]).index_select(0, (index + offset).flatten()).view(*index.shape, shape[-1])


def look_back(chunks: Tensor, last: Tensor) -> Tensor:
    """Each chunk with the one before it, (b, h, r, c, s, d) to (b, h, r, c, 2 s, d); before the first is the `last`.

    The wrap-around stays within a hash round and an example's valid tokens, so that up to 2 s tokens attend exactly.
    (Transformers wraps from the first chunk of a round to the last one of the round before, padding or not.)
    """
    index = last.view(-1, 1, 1, 1, 1, 1).expand_as(chunks[:, :, :, :1])
    before = torch.cat((chunks.gather(3, index), chunks[:, :, :, :-1]), dim=3)
    return torch.cat((before, chunks), dim=4)


def window_bias(counts: Tensor, last: Tensor, num_chunks: int, size: int, dtype: torch.dtype) -> Tensor:
    """What to add to the logits of `look_back`'s windows: (b, 1, 1, c, s, 2 s). Valid tokens come first in the order."""
    chunk, offset = (torch.arange(length, device=counts.device) for length in (num_chunks, size))
    before = torch.where(chunk == 0, last.unsqueeze(1), chunk - 1)  # (b c)
    # with a single chunk the one before it is itself: count it once
    is_valid = torch.cat(
        (
            (before.unsqueeze(-1) * size + offset < counts.view(-1, 1, 1)) & (before != chunk).unsqueeze(-1),
            (chunk.unsqueeze(-1) * size + offset).unsqueeze(0) < counts.view(-1, 1, 1),
        ),
        dim=-1,
    )  # (b c 2s)
    bias = torch.zeros(is_valid.shape, dtype=dtype, device=counts.device).masked_fill(~is_valid, -torch.inf)
    itself = offset.unsqueeze(1) + size == torch.arange(2 * size, device=counts.device)  # (s 2s)
    return bias.unsqueeze(-2).masked_fill(itself, SELF_LOGIT)[:, None, None]


def reformer_attention(
    query: Tensor, value: Tensor, rotations: Tensor, mask: Tensor | None = None, bucket_size: int = 64
) -> Tensor:
    """LSH attention on (b, h, n, d), `mask` (b, n) True for real tokens. The keys are the queries at unit length.

    `rotations` (h, d, r, directions) holds the random directions of r hash rounds. Each token sees its chunk of
    `bucket_size` tokens in the order of the hash and the chunk before; a log-sum-exp joins the rounds.

    >>> x = torch.randn(2, 4, 1000, 8)
    >>> reformer_attention(x, x, torch.randn(4, 8, 2, 64)).shape
    torch.Size([2, 4, 1000, 8])
    """
    length, dim = query.shape[2:]
    padding = -length % bucket_size
    # exponentials, and a hash that rounding would change: never in half precision
    dtype = torch.promote_types(value.dtype, torch.float32)
    with torch.autocast(value.device.type, enabled=False):
        q, v = (functional.pad(zero_padding(x, mask).to(dtype), (0, 0, 0, padding)) for x in (query, value))
        is_valid = torch.ones(query.shape[0], length, dtype=torch.bool, device=query.device) if mask is None else mask
        is_valid = functional.pad(is_valid, (0, padding), value=False)
        counts = is_valid.sum(dim=1)
        last = ((counts - 1) // bucket_size).clamp(min=0)  # the last chunk with valid tokens
        order = hash_order(q, rotations.to(dtype), is_valid, counts, bucket_size)  # (b h r n)

        q, v = (take_rows(x, order.flatten(2)).view(*order.shape[:3], -1, bucket_size, dim) for x in (q, v))
        k = q * (q.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * dim**-0.5  # |k| = 1
        logits = q @ look_back(k, last).mT  # (b h r c s 2s)
        logits += window_bias(counts, last, logits.shape[3], bucket_size, dtype)
        largest = logits.detach().amax(dim=-1, keepdim=True)
        weights = logits.sub_(largest).exp_()
        numerator, normaliser = weights @ look_back(v, last), weights.sum(dim=-1, keepdim=True)

        inverse = torch.empty_like(order).scatter_(
            -1, order, torch.arange(length + padding, device=order.device).expand_as(order)
        )
        numerator, normaliser, largest = (take_rows(x.flatten(3, 4), inverse) for x in (numerator, normaliser, largest))
        share = (largest - largest.amax(dim=2, keepdim=True)).exp()  # (b h r n 1), of each round
        out = (numerator * share).sum(dim=2) / (normaliser * share).sum(dim=2)
    return zero_padding(out[:, :, :length].to(value.dtype), mask)


class ReformerAttention(Attention):
    """`num_hashes`: rounds of hashing. `bucket_size`: tokens in a chunk. New hash directions are drawn for each forward,
    from torch's generator. `key` is ignored: queries serve as keys.
    """

    shares_query_key = True
    stochastic = True
    size_option = "num_hashes"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_length: int | None = None,
        *,
        num_hashes: int = 2,
        bucket_size: int = 64,
    ) -> None:
        super().__init__(num_heads, head_dim, max_length)
        check_at_least("num_hashes", num_hashes, 1, "the paper uses 2")
        check_at_least("bucket_size", bucket_size, 1, "64 is usual")
        self.num_hashes, self.bucket_size = num_hashes, bucket_size

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        shape = (self.num_heads, self.head_dim, self.num_hashes, NUM_DIRECTIONS)
        rotations = torch.randn(shape, device=query.device)
        return reformer_attention(query, value, rotations, mask, self.bucket_size)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_hashes={self.num_hashes}, bucket_size={self.bucket_size}"
