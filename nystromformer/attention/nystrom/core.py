"""What Nyström attention computes, once its input is checked: landmarks, pseudoinverse, and the passes around them.

A batch goes through `attend`, with its masks. Sequences without padding, of one length or of many, go through
`attend_to_sequences`, each alone but for the pseudoinverses, which are made in one batch. Where machine code of our own
can do all of it, `native.whole_attention` does: of batches, of the valid tokens of padded ones, of packed sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypedDict

import torch
from torch import Tensor

from nystromformer.attention import native
from nystromformer.attention.nystrom.landmarks import (
    LANDMARKS,
    Segments,
    check_grid,
    farthest_tokens,
    grid_segments,
    kmeans_means,
    means_over,
    segments,
)
from nystromformer.attention.nystrom.pseudoinverse import PSEUDOINVERSES, SCALINGS, exact_pinv, iterative_pinv
from nystromformer.attention.shared.common import (
    all_are_short,
    check_exact_below,
    exact_where_short,
    key_padding_mask,
    softmax_attention,
)
from nystromformer.attention.shared.skip_convolution import skip_convolution
from nystromformer.attention.shared.varlen import PackedInput, as_rows, attend_to_spans
from nystromformer.checks import check_at_least, check_choice


@dataclass(frozen=True, kw_only=True)
class NystromOptions:
    """How the softmax matrix is approximated. Checked when made."""

    num_landmarks: int = 64
    pinv_iterations: int = 6
    pinv_scaling: str = "matrix"
    landmarks: str = "segment_means"
    grid_shape: Sequence[int] | None = None
    pinv: str = "iterative"
    exact_below: int | None = None

    def __post_init__(self) -> None:
        check_at_least("num_landmarks", self.num_landmarks, 1, "the paper uses 64")
        check_at_least("pinv_iterations", self.pinv_iterations, 0, "the paper uses 6")
        check_choice("pinv_scaling", self.pinv_scaling, SCALINGS)
        check_choice("landmarks", self.landmarks, LANDMARKS)
        check_grid(self.landmarks, self.grid_shape)
        check_choice("pinv", self.pinv, PSEUDOINVERSES)
        check_exact_below(self.exact_below)

    @property
    def exact_up_to(self) -> int:
        """The number of valid tokens up to which nothing is approximated."""
        return max(self.num_landmarks, self.exact_below or 0)


class NystromKeywords(TypedDict, total=False):
    """The same as keywords of functions."""

    num_landmarks: int
    pinv_iterations: int
    pinv_scaling: str
    landmarks: str
    grid_shape: Sequence[int] | None
    pinv: str
    exact_below: int | None


@dataclass(frozen=True)
class LandmarkCore:
    """All that is small: landmarks, and the pseudoinverse of their softmax matrix."""

    queries: Tensor  # Q̃ (b h m d), at least float32
    keys: Tensor  # K̃ (b h m d)
    inverse: Tensor  # Z ≈ A⁺ (b h m m)
    attendable_keys: Tensor | None  # which K̃ a softmax may use, (b, 1 or h, 1, m)
    query_segments: Segments
    key_segments: Segments


def landmark_core(
    query: Tensor,
    key: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    options: NystromOptions,
) -> LandmarkCore:
    query_segments = key_segments = _segments(query, query_mask, options)
    if torch.compiler.is_exporting() or key_mask is not query_mask or key.shape[2] != query.shape[2]:
        key_segments = _segments(key, key_mask, options)
    queries, query_occupied = _landmarks(query, query_segments, query_mask, options.landmarks)
    keys, key_occupied = _landmarks(key, key_segments, key_mask, options.landmarks, liked_by=query)
    allowed = None if key_occupied is None else (key_occupied | ~key_occupied.any(-1, keepdim=True))[:, :, None, :]
    Z = softmax_inverse(queries, keys, query_occupied, allowed, scale, options)
    return LandmarkCore(queries, keys, Z, allowed, query_segments, key_segments)


def softmax_inverse(
    queries: Tensor,
    keys: Tensor,
    query_occupied: Tensor | None,
    allowed: Tensor | None,
    scale: float,
    options: NystromOptions,
) -> Tensor:
    """Z ≈ A⁺ (b, h, m, m) for landmarks Q̃ and K̃ (b, h, m, d).

    `query_occupied` (b, 1 or h, m) and `allowed` (b, 1 or h, 1, m) leave out what stands for no token; None: nothing.
    """
    A = masked_softmax(scale * queries @ keys.mT, allowed)  # (b h m m)
    if query_occupied is not None:
        A = A.masked_fill(~query_occupied[..., None], 0)  # rows of empty segments, like their columns above
    if options.pinv == "exact":
        return exact_pinv(A)
    return iterative_pinv(A, options.pinv_iterations, options.pinv_scaling)


def _segments(tokens: Tensor, mask: Tensor | None, options: NystromOptions) -> Segments:
    if options.grid_shape is not None:
        return grid_segments(tokens, options.num_landmarks, mask, options.grid_shape)
    return segments(tokens, options.num_landmarks, mask)


def _landmarks(
    tokens: Tensor, divided: Segments, mask: Tensor | None, method: str, liked_by: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Landmarks (b, h, m, d) and which of them stand for a token, (b, 1 or h, m); None where all surely do.

    `liked_by` are the queries, where `tokens` are keys.
    """
    if method == "kmeans":
        means, counts = kmeans_means(tokens, divided, mask)
        return means, counts > 0
    if method == "fps":
        return farthest_tokens(tokens, divided, mask, liked_by)
    surely_occupied = mask is None and method != "grid" and not torch.compiler.is_exporting()
    return means_over(tokens, divided), None if surely_occupied else divided.occupied[:, None]


def masked_softmax(logits: Tensor, allowed: Tensor | None) -> Tensor:
    return torch.softmax(logits if allowed is None else logits.masked_fill(~allowed, -math.inf), dim=-1)


def attend_and_skip(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    kernel: Tensor | None,
    scale: float,
    options: NystromOptions,
) -> Tensor:
    """`attend` and the skip convolution of the values with `kernel` (h, k). Masked rows must be zero already."""
    if query_mask is None and key_mask is None and runs_whole(query, key, value, kernel, options):
        return _whole(query, key, value, kernel, scale, options)
    return plus_skip(attend(query, key, value, query_mask, key_mask, scale, options), value, kernel)


def runs_whole(query: Tensor, key: Tensor, value: Tensor, kernel: Tensor | None, options: NystromOptions) -> bool:
    """Whether machine code of our own computes all of it for batches without masks."""
    return _is_native(query, key, value, kernel, options) and not is_exact(query, key, options)


def takes_spans(query: Tensor, key: Tensor, value: Tensor, kernel: Tensor | None, options: NystromOptions) -> bool:
    """Whether it does for sequences of any lengths, (b, h, n, d) or packed (t, h, d)."""
    return _is_native(query, key, value, kernel, options) and options.exact_up_to <= native.MOST_COLUMNS


def _is_native(query: Tensor, key: Tensor, value: Tensor, kernel: Tensor | None, options: NystromOptions) -> bool:
    """Whether all is done as in the paper, with one pseudoinverse for each matrix, on what machine code can take."""
    as_in_the_paper = (options.landmarks, options.pinv, options.pinv_scaling) == (
        "segment_means",
        "iterative",
        "matrix",
    )
    tensors = (query, key, value) if kernel is None else (query, key, value, kernel)
    return as_in_the_paper and options.num_landmarks <= native.MOST_COLUMNS and native.runs_native(*tensors)


def _whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    scale: float,
    options: NystromOptions,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    sizes = options.num_landmarks, options.pinv_iterations
    exact_up_to = 0 if spans is None else options.exact_up_to
    return native.whole_attention(query, key, value, kernel, *sizes, scale, spans, exact_up_to)


def plus_skip(out: Tensor, value: Tensor, kernel: Tensor | None) -> Tensor:
    if kernel is None:
        return out
    skip = skip_convolution(value, kernel)
    # Attention needs its own output for backward; without backward the sum needs no memory of its own.
    return out + skip if out.requires_grad or skip.requires_grad else out.add_(skip)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float,
    options: NystromOptions,
) -> Tensor:
    """F A⁺ B V, exact for short examples. Masked rows must be zero already."""
    exporting = torch.compiler.is_exporting()  # one graph for all lengths: no decision may rest on a length
    m = options.num_landmarks
    if not exporting and is_exact(query, key, options):
        return softmax_attention(query, key, value, key_padding_mask(key_mask), scale)

    core = landmark_core(query, key, query_mask, key_mask, scale, options)
    BV = softmax_attention(core.queries.to(value.dtype), key, value, key_padding_mask(key_mask), scale)  # (b h m e)
    W = (core.inverse @ BV.to(core.inverse.dtype)).to(value.dtype)  # (b h m e)
    if exporting or key_mask is not None:
        # With one key per segment K̃ = K, so that F is the exact softmax matrix and belongs to the values themselves.
        own_values = means_over(value, core.key_segments).to(value.dtype)
        W = torch.where(core.key_segments.one_token_each[:, None, None, None], own_values, W)
    out = softmax_attention(query, core.keys.to(value.dtype), W, core.attendable_keys, scale)
    if exporting or (query_mask is not None and query_mask is not key_mask):
        # With one query per segment Q̃ = Q, so that B V already holds the exact row of each query.
        index = core.query_segments.index[:, None, :, None].expand(-1, *BV.shape[1:2], -1, BV.shape[3])
        own_rows = BV.gather(2, index)
        out = torch.where(core.query_segments.one_token_each[:, None, None, None], own_rows, out)
    if options.exact_up_to == m:
        return out
    return exact_where_short(out, query, key, value, query_mask, key_mask, scale, options.exact_below)


def is_exact(query: Tensor, key: Tensor, options: NystromOptions) -> bool:
    """Whether nothing is approximated, by the lengths (b, h, n, d) and (b, h, s, d) alone."""
    few = min(query.shape[2], key.shape[2]) <= options.num_landmarks
    return few or (options.exact_below is not None and all_are_short(query, key, options.exact_below))


def attend_within(
    spans: list[tuple[int, int]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel: Tensor | None,
    scale: float,
    options: NystromOptions,
) -> Tensor:
    """`attend_and_skip` of each example's valid tokens, which begin and end where `spans` tells; zeros around them."""
    if all(after - first == query.shape[2] for first, after in spans):
        return attend_and_skip(query, key, value, None, None, kernel, scale, options)
    if takes_spans(query, key, value, kernel, options):
        return _whole(query, key, value, kernel, scale, options, spans)
    attend = partial(attend_to_sequences, kernel=kernel, scale=scale, options=options)
    return attend_to_spans(attend, spans, query, key, value)


def attend_packed(packed: PackedInput, kernel: Tensor | None, scale: float, options: NystromOptions) -> Tensor:
    """`attend_and_skip` of each sequence alone: (t, h, e)."""
    tensors = packed.query, packed.key, packed.value
    if packed.is_self_attention and takes_spans(*tensors, kernel, options):
        spans = list(pairwise(packed.queries.offsets.tolist()))
        return _whole(*tensors, kernel, scale, options, spans)
    outs = attend_to_sequences(*packed.sequences(), kernel=kernel, scale=scale, options=options)
    return torch.cat([as_rows(out) for out in outs])


def attend_to_sequences(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    *,
    kernel: Tensor | None,
    scale: float,
    options: NystromOptions,
) -> list[Tensor]:
    """`attend_and_skip` of each (b, h, n, d), (b, h, s, d) and (b, h, s, e) alone, of lengths that may all differ.

    Nothing is padded. What is small, the landmarks' softmax matrices and their pseudoinverses, is one batch.
    """
    done: dict[int, Tensor] = {}
    outs: dict[int, Tensor] = {}  # without the convolution
    approximated = []
    for i, (query, key, value) in enumerate(zip(queries, keys, values, strict=True)):
        if runs_whole(query, key, value, kernel, options):
            done[i] = _whole(query, key, value, kernel, scale, options)
        elif is_exact(query, key, options):
            outs[i] = softmax_attention(query, key, value, None, scale)
        else:
            approximated.append(i)
    if approximated:
        queries_, keys_, values_ = ([each[i] for i in approximated] for each in (queries, keys, values))
        outs |= zip(approximated, _attend_through_landmarks(queries_, keys_, values_, scale, options), strict=True)
    done |= {i: plus_skip(out, values[i], kernel) for i, out in outs.items()}
    return [done[i] for i in range(len(values))]


def _attend_through_landmarks(
    queries: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, options: NystromOptions
) -> list[Tensor]:
    sizes = [query.shape[0] for query in queries]
    landmark_queries, query_occupied = _landmarks_of_each(queries, options)
    landmark_keys, key_occupied = _landmarks_of_each(keys, options, queries)
    allowed = None if key_occupied is None else key_occupied[:, :, None, :]
    Z = softmax_inverse(landmark_queries, landmark_keys, query_occupied, allowed, scale, options)
    dtype = values[0].dtype
    passes = zip(landmark_queries.to(dtype).split(sizes), keys, values, strict=True)
    BV = torch.cat([softmax_attention(Q, key, value, None, scale) for Q, key, value in passes])  # (b h m e)
    W = (Z @ BV.to(Z.dtype)).to(dtype)
    seen = [None] * len(sizes) if allowed is None else allowed.split(sizes)
    passes_ = zip(queries, landmark_keys.to(dtype).split(sizes), W.split(sizes), seen, strict=True)
    return [softmax_attention(query, K, own, of_own, scale) for query, K, own, of_own in passes_]


def _landmarks_of_each(
    sequences: Sequence[Tensor], options: NystromOptions, liked_by: Sequence[Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    likers: Sequence[Tensor | None] = [None] * len(sequences) if liked_by is None else liked_by
    pairs = zip(sequences, likers, strict=True)
    found = (_landmarks(x, _segments(x, None, options), None, options.landmarks, liker) for x, liker in pairs)
    means, occupied = zip(*found, strict=True)
    return torch.cat(means), None if occupied[0] is None else torch.cat(occupied)
