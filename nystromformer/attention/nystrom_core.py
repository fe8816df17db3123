"""The small part of Nyström attention: landmarks, and the pseudoinverse of the softmax matrix between them."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nystromformer.attention.checks import check_at_least, check_choice
from nystromformer.attention.landmarks import Segments, check_landmarks, kmeans_means, means_over, segments
from nystromformer.attention.pseudoinverse import PSEUDOINVERSES, SCALINGS, exact_pinv, iterative_pinv


@dataclass(frozen=True, kw_only=True)
class NystromOptions:
    """How the softmax matrix is approximated. Checked when made."""

    num_landmarks: int = 64
    pinv_iterations: int = 6
    pinv_scaling: str = "matrix"
    landmarks: str = "segment_means"
    pinv: str = "iterative"

    def __post_init__(self) -> None:
        check_at_least("num_landmarks", self.num_landmarks, 1, "the paper uses 64")
        check_at_least("pinv_iterations", self.pinv_iterations, 0, "the paper uses 6")
        check_choice("pinv_scaling", self.pinv_scaling, SCALINGS)
        check_landmarks(self.landmarks)
        check_choice("pinv", self.pinv, PSEUDOINVERSES)


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
    m = options.num_landmarks
    query_segments, key_segments = segments(query, m, query_mask), segments(key, m, key_mask)
    queries, query_occupied = _landmarks(query, query_segments, query_mask, options.landmarks)
    keys, key_occupied = _landmarks(key, key_segments, key_mask, options.landmarks)
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


def _landmarks(tokens: Tensor, divided: Segments, mask: Tensor | None, method: str) -> tuple[Tensor, Tensor | None]:
    """Landmarks (b, h, m, d) and which of them stand for a token, (b, 1 or h, m); None where all surely do."""
    if method == "kmeans":
        means, counts = kmeans_means(tokens, divided, mask)
        return means, counts > 0
    surely_occupied = mask is None and not torch.compiler.is_exporting()
    return means_over(tokens, divided), None if surely_occupied else divided.occupied[:, None]


def masked_softmax(logits: Tensor, allowed: Tensor | None) -> Tensor:
    return torch.softmax(logits if allowed is None else logits.masked_fill(~allowed, -math.inf), dim=-1)


def checked_scale(scale: float | None, query: Tensor) -> float:
    if scale is None:
        return query.shape[3] ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale={scale!r} is a {type(scale).__name__}: must be a number, or None for d ** -0.5.")
    if not math.isfinite(scale):
        raise ValueError(f"scale={scale}: must be finite; None means d ** -0.5.")
    return float(scale)
