"""Landmarks: the m points that stand for all queries or keys.

Segments are counted over valid tokens: with n_valid of them, the token of rank r belongs to segment ⌊r·m / n_valid⌋.
So landmarks depend neither on the content nor on the amount of padding, and with n_valid ≤ m each segment holds at
most one token: landmarks are then the tokens themselves.

Other landmarks are means of clusters (`kmeans_means`), of the tiles of a grid (`grid_segments`), or tokens that lie far
from one another (`farthest_tokens`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from nystromformer.attention.shared.common import (
    at_least_float32,
    check_mask,
    check_query_key_value,
    check_tokens,
    checked_scale,
    zero_masked,
)
from nystromformer.checks import check_at_least

LANDMARKS = ("segment_means", "kmeans", "fps", "grid")
LLOYD_STEPS = 3
CENTERS_AT_ONCE = 8
"""Centers of k-means that all tokens are compared with together: no n×m matrix is made."""


def segment_means(tokens: Tensor, num_landmarks: int, mask: Tensor | None = None) -> Tensor:
    """Segment-means landmarks of `tokens` (b, h, n, d): (b, h, m, d), at least in float32; 0 for empty segments.

    The paper's formula divides by m where it means the segment length; this divides by the number of valid tokens.

    >>> segment_means(torch.arange(6.0).view(1, 1, 6, 1), 3).flatten()
    tensor([0.5000, 2.5000, 4.5000])
    """
    check_tokens("tokens", tokens)
    check_at_least("num_landmarks", num_landmarks, 1, "the paper uses 64")
    check_mask("mask", mask, tokens)
    return means_over(zero_masked(tokens, mask), segments(tokens, num_landmarks, mask))


def kmeans_landmarks(tokens: Tensor, num_landmarks: int, mask: Tensor | None = None) -> Tensor:
    """K-means landmarks of `tokens` (b, h, n, d): (b, h, m, d), at least in float32; 0 for empty clusters.

    >>> two_clumps = torch.tensor([0.0, 0.1, 0.2, 9.0]).view(1, 1, 4, 1)
    >>> kmeans_landmarks(two_clumps, 2).flatten()
    tensor([0.1000, 9.0000])
    """
    check_tokens("tokens", tokens)
    check_at_least("num_landmarks", num_landmarks, 1, "the paper uses 64")
    check_mask("mask", mask, tokens)
    return kmeans_means(zero_masked(tokens, mask), segments(tokens, num_landmarks, mask), mask)[0]


def sampled_softmax_approximation(
    query: Tensor, key: Tensor, num_samples: int, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Approximate S = softmax(Q Kᵀ/√d) from m of its own columns and rows; returns (Ŝ, S), both (b, h, n, s).

    This is the paper's section "Nyström method for matrix approximation" (eq. 2 to 6): Ŝ = S[:, J] (S[I, J])⁺ S[I, :],
    with I and J evenly spaced. It is exact on the sampled rows and columns where S[I, J] is invertible. A softmax row
    is normalized over all its entries, so sampling columns needs the full matrix first: O(n·s) time and memory, which
    is what `nystrom_attention` avoids by choosing landmarks before the softmax.

    >>> x = torch.randn(1, 1, 20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> approximation, softmax = sampled_softmax_approximation(x, x, num_samples=20)
    >>> torch.allclose(approximation, softmax)
    True
    """
    check_query_key_value(query, key)
    check_at_least("num_samples", num_samples, 1)
    longest = min(query.shape[2], key.shape[2])
    if num_samples > longest:
        raise ValueError(f"num_samples={num_samples}: must be at most {longest}, the smaller of n and s.")
    scale = checked_scale(scale, query)
    S = torch.softmax(scale * query @ key.mT, dim=-1)
    rows = _evenly_spaced(query.shape[2], num_samples, query.device)
    columns = _evenly_spaced(key.shape[2], num_samples, key.device)
    core = S[:, :, rows][..., columns]  # A_S of the paper
    return S[..., columns] @ torch.linalg.pinv(core) @ S[:, :, rows], S


@dataclass(frozen=True)
class Segments:
    """Which segment each token of a batch belongs to."""

    index: Tensor  # (b, n): padding counts to the segment of the valid token after it
    counts: Tensor  # (b, m): valid tokens in each segment, 0 where it is empty
    valid: Tensor  # (b,): valid tokens of each example
    size: int | None = None  # tokens in every segment, where none is padding and that is known without looking at them

    @property
    def num_segments(self) -> int:
        return self.counts.shape[1]

    @property
    def occupied(self) -> Tensor:
        """(b, m): the segments that hold a token."""
        return self.counts > 0

    @property
    def one_token_each(self) -> Tensor:
        """(b,): the examples with at most one token in each segment."""
        return self.valid <= self.num_segments


def segments(tokens: Tensor, num_segments: int, mask: Tensor | None = None) -> Segments:
    """Divide the valid tokens of each example of `tokens` (b, h, n, d) into segments of equal size, up to one token.

    >>> segments(torch.zeros(1, 1, 7, 1), 3).index
    tensor([[0, 0, 0, 1, 1, 2, 2]])
    >>> segments(torch.zeros(1, 1, 4, 1), 2, torch.tensor([[True, False, False, True]])).counts
    tensor([[1, 1]])
    """
    batch, length, device = tokens.shape[0], tokens.shape[2], tokens.device
    if mask is not None:
        return segments_of_ranks(mask.long().cumsum(dim=1) - mask.long(), mask.sum(dim=1), num_segments)
    place = torch.arange(length, device=device)
    valid = torch.full((batch,), length, device=device)
    # A graph that is exported serves all lengths: no decision may rest on one.
    if torch.compiler.is_exporting() or length % num_segments:
        return segments_of_ranks(place.expand(batch, length), valid, num_segments)
    size = length // num_segments
    counts = torch.full((batch, num_segments), size, device=device)
    return Segments((place // size).expand(batch, length), counts, valid, size)


def segments_of_ranks(rank: Tensor, valid: Tensor, num_segments: int) -> Segments:
    """Segments from each token's rank (b, n) among the valid ones, of which there are `valid` (b,) in all.

    The tokens may be some of an example's only, as where a sequence is split over processes.

    >>> segments_of_ranks(torch.tensor([[4, 5, 6]]), torch.tensor([7]), 3).index
    tensor([[1, 2, 2]])
    """
    # Trailing padding has rank n_valid, an all-padding example n_valid = 0: both are clamped into range.
    index = (rank * num_segments // valid.clamp(min=1)[:, None]).clamp(max=num_segments - 1)
    # The first rank of segment j is ⌈j · n_valid / m⌉.
    edges = torch.arange(num_segments + 1, device=rank.device)
    first = (edges * valid[:, None] + (num_segments - 1)) // num_segments
    return Segments(index=index, counts=first.diff(dim=1), valid=valid)


def means_over(tokens: Tensor, segments: Segments) -> Tensor:
    """Mean of `tokens` (b, h, n, d) over each segment, (b, h, m, d), at least in float32; 0 where it is empty.

    Padding must be zero already. One pass over the tokens in the (b, n, h·d) layout that projections produce.
    """
    batch, heads, length, width = tokens.shape
    m = segments.num_segments
    rows = tokens.transpose(1, 2).to(at_least_float32(tokens.dtype))  # (b n h d)
    if segments.size is not None:
        return rows.unflatten(1, (m, segments.size)).mean(dim=2).transpose(1, 2)
    offsets = torch.arange(batch, device=tokens.device)[:, None] * m
    rows = rows.reshape(batch * length, heads * width)
    sums = rows.new_zeros(batch * m, heads * width).index_add(0, (segments.index + offsets).flatten(), rows)
    means = sums.view(batch, m, heads * width) / segments.counts.clamp(min=1)[..., None]
    return means.view(batch, m, heads, width).transpose(1, 2)


def kmeans_means(tokens: Tensor, segments: Segments, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """K-means landmarks: a few Lloyd steps for each head, from segment means on. Padding must be zero already.

    Returns the landmarks (b, h, m, d) and how many tokens each stands for (b, h, m). Deterministic: ties go to the
    first center. The assignment has no gradient; the means have. Examples with at most m valid tokens keep one token
    per landmark (identical tokens would otherwise merge, and attention to them would no longer be exact).
    """
    batch, heads, _, _ = tokens.shape
    m = segments.num_segments
    points = tokens.to(at_least_float32(tokens.dtype))
    start = means_over(points, segments)
    occupied = segments.occupied[:, None, :].expand(batch, heads, m)
    centers, counts = start, segments.counts[:, None, :].expand(batch, heads, m)
    for _ in range(LLOYD_STEPS):
        assignment = nearest_center(points.detach(), centers.detach(), counts > 0)  # (b, h, n)
        centers, counts = _means_by_assignment(points, assignment, m, mask)
    few = segments.one_token_each[:, None, None]
    return (
        torch.where(few[..., None], start, centers),
        torch.where(few, occupied.to(counts.dtype), counts),
    )


def nearest_center(points: Tensor, centers: Tensor, occupied: Tensor) -> Tensor:
    """Index (b, h, n) of the nearest occupied center (b, h, m, d) of each point (b, h, n, d).

    A few centers at a time, so that no n×m matrix is made.
    """
    best = torch.full(points.shape[:3], torch.inf, dtype=points.dtype, device=points.device)
    index = torch.zeros(points.shape[:3], dtype=torch.long, device=points.device)
    for first in range(0, centers.shape[2], CENTERS_AT_ONCE):
        some = centers[:, :, first : first + CENTERS_AT_ONCE]
        # ‖x − c‖² up to ‖x‖², which is the same for all centers.
        distance = some.square().sum(-1)[:, :, None, :] - 2 * points @ some.mT  # (b h n 8)
        distance = distance.masked_fill(~occupied[:, :, None, first : first + CENTERS_AT_ONCE], torch.inf)
        nearest, which = distance.min(dim=-1)
        index = torch.where(nearest < best, which + first, index)
        best = torch.minimum(nearest, best)
    return index


def _means_by_assignment(points: Tensor, assignment: Tensor, m: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = points.shape
    offsets = torch.arange(batch * heads, device=points.device)[:, None] * m
    rows = (assignment.reshape(batch * heads, length) + offsets).flatten()
    sums = points.new_zeros(batch * heads * m, width).index_add(0, rows, points.reshape(-1, width))
    ones = torch.ones((batch, length), dtype=torch.long, device=points.device) if mask is None else mask.long()
    ones = ones[:, None, :].expand(batch, heads, length).reshape(-1)
    counts = ones.new_zeros(batch * heads * m).index_add(0, rows, ones)
    means = sums / counts.clamp(min=1)[:, None]
    return means.view(batch, heads, m, width), counts.view(batch, heads, m)


def _evenly_spaced(length: int, count: int, device: torch.device) -> Tensor:
    """`count` different positions, the middle of each of `count` equal segments."""
    return ((torch.arange(count, device=device) * 2 + 1) * length) // (2 * count)


def check_grid(landmarks: str, shape: Sequence[int] | None) -> None:
    """A shape goes with landmarks="grid", and with that alone."""
    if landmarks != "grid":
        if shape is not None:
            raise ValueError(f"grid_shape={shape!r} with landmarks={landmarks!r}: it is for landmarks='grid'.")
        return
    whole = isinstance(shape, Sequence) and all(isinstance(size, int) and size >= 1 for size in shape)
    if shape is None or not whole or len(shape) != 2:
        raise ValueError(f"grid_shape={shape!r}: must be two whole numbers, rows and columns, as (32, 32).")


def tiles_of(shape: Sequence[int], most: int) -> tuple[int, int]:
    """How many rows and columns of tiles: as many tiles as `most` allows, and of those the squarest.

    >>> tiles_of((32, 32), 64), tiles_of((10, 40), 64)
    ((8, 8), (4, 16))
    """
    rows, columns = shape
    fitting = [(a, b) for a, b in product(range(1, most + 1), repeat=2) if a * b <= most and a <= rows and b <= columns]
    return max(fitting, key=lambda tiles: (tiles[0] * tiles[1], -abs(rows * tiles[1] - columns * tiles[0]), tiles))


def grid_segments(tokens: Tensor, num_segments: int, mask: Tensor | None, shape: Sequence[int]) -> Segments:
    """The tiles that `tokens` (b, h, n, d) of a grid of `shape`, row by row, belong to. Some may be empty.

    Examples with at most `num_segments` valid tokens have one token in each segment, as `segments` gives them.

    >>> grid_segments(torch.zeros(1, 1, 16, 1), 4, None, (4, 4)).index.view(4, 4)
    tensor([[0, 0, 1, 1],
            [0, 0, 1, 1],
            [2, 2, 3, 3],
            [2, 2, 3, 3]])
    """
    rows, columns = shape
    batch, length = tokens.shape[0], tokens.shape[2]
    if length != rows * columns:
        raise ValueError(
            f"grid_shape={tuple(shape)} has {rows * columns} places, and there are {length} tokens: must be as many."
        )
    down, across = tiles_of(shape, num_segments)
    row, column = (torch.arange(size, device=tokens.device) for size in (rows, columns))
    tile = (row * down // rows)[:, None] * across + column * across // columns  # (rows columns)
    in_line = segments(tokens, num_segments, mask)
    index = torch.where(in_line.one_token_each[:, None], in_line.index, tile.flatten())  # (b n)
    present = torch.ones_like(index) if mask is None else mask.long()
    counts = present.new_zeros(batch, num_segments).scatter_add(1, index, present)
    return replace(in_line, index=index, counts=counts, size=None)


def farthest_tokens(
    tokens: Tensor, segments: Segments, mask: Tensor | None = None, liked_by: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Landmarks (b, h, m, d) of `tokens` (b, h, n, d), at least in float32, and which are no repetition, (b, h, m).

    They are tokens, chosen one after the other as far as can be from those before. So landmarks lie in all places where
    tokens are, and single tokens that differ from all others are among them, as attention sinks do: Fast Nyström
    Attention (2025) uses such landmarks in pretrained models.

    The first is the key that the queries `liked_by` (b, h, n', d) like most on average, the sink of a head; without
    them the token farthest from the mean. Padding must be zero already. The choice has no gradient, the tokens have.
    Examples with at most m valid tokens keep one token per landmark, in their order.

    >>> tokens = torch.tensor([0.0, 1.0, 5.0, 5.1]).view(1, 1, 4, 1)
    >>> farthest_tokens(tokens, segments(tokens, 2))[0].flatten()
    tensor([0.0000, 5.1000])
    """
    batch, heads = tokens.shape[:2]
    points = tokens.to(at_least_float32(tokens.dtype))
    index, new = _farthest(points.detach(), segments, mask, liked_by)
    few = segments.one_token_each[:, None, None]
    chosen = torch.where(few[..., None], means_over(points, segments), points.take_along_dim(index[..., None], dim=2))
    return chosen, torch.where(few, segments.occupied[:, None].expand(batch, heads, -1), new)


@torch.no_grad()
def _farthest(
    points: Tensor, segments: Segments, mask: Tensor | None, liked_by: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Places (b, h, m), and whether each differs from those before it."""
    absent = None if mask is None else ~mask[:, None]  # (b 1 n)

    def best(score: Tensor) -> tuple[Tensor, Tensor]:
        return (score if absent is None else score.masked_fill(absent, -torch.inf)).max(dim=2)

    if liked_by is None:
        mean = points.sum(2, keepdim=True) / segments.valid.clamp(min=1)[:, None, None, None]
        _, place = best((points - mean).square().sum(-1))
    else:
        _, place = best((points @ liked_by.to(points.dtype).sum(2)[..., None])[..., 0])
    places, distances = [place], [torch.ones_like(place, dtype=points.dtype)]
    nearest = torch.full(points.shape[:3], torch.inf, dtype=points.dtype, device=points.device)
    for _ in range(segments.num_segments - 1):
        last = points.take_along_dim(place[..., None, None], dim=2)  # (b h 1 d)
        nearest = torch.minimum(nearest, (points - last).square().sum(-1))
        distance, place = best(nearest)
        places.append(place)
        distances.append(distance)
    return torch.stack(places, dim=2), torch.stack(distances, dim=2) > 0
