"""Sentence-order prediction: a chunk divided into two segments, swapped or not."""

import numpy as np

IN_ORDER, SWAPPED, NO_PAIR = 0, 1, -100


def divide(boundaries: np.ndarray, rng: np.random.Generator) -> int:
    """One of the places where a chunk may be divided, each as likely."""
    return int(boundaries[rng.integers(len(boundaries))])


def shortened(lengths: tuple[int, int], limit: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """The ranges of two segments that are kept, `limit` tokens together: the longer one is cut first, at both ends.

    The rule knows nothing about which segment comes first, so that cuts don't tell the order.

    >>> shortened((10, 3), 13, np.random.default_rng(0))
    [(0, 10), (0, 3)]
    >>> shortened((10, 3), 8, np.random.default_rng(0))
    [(2, 7), (0, 3)]
    """
    first, second = lengths
    surplus = first + second - limit
    if surplus <= 0:
        return [(0, first), (0, second)]
    from_longer = min(surplus, abs(first - second))
    even, odd = divmod(surplus - from_longer, 2)
    cuts = [even, even]
    cuts[0 if first > second else 1] += from_longer
    cuts[int(rng.integers(2))] += odd
    fronts = [int(rng.binomial(cut, 0.5)) for cut in cuts]
    return [(front, length - cut + front) for front, cut, length in zip(fronts, cuts, lengths, strict=True)]


def sentence_order(
    tokens: np.ndarray, boundaries: np.ndarray, limit: int, rng: np.random.Generator
) -> tuple[list[np.ndarray], int]:
    """The segments of an example and the label of their order.

    `boundaries` are the ends of sentences within `tokens`. Without one the example is a single segment that says
    nothing about order: labelled as swapped, it would be right for nothing.

    >>> segments, label = sentence_order(np.arange(6), np.array([2]), 6, np.random.default_rng(0))
    >>> [segment.tolist() for segment in segments], label
    ([[2, 3, 4, 5], [0, 1]], 1)
    """
    if not len(boundaries):
        return [tokens[:limit]], NO_PAIR
    at = divide(boundaries, rng)
    segments = [tokens[:at], tokens[at:]]
    kept = shortened((at, len(tokens) - at), limit, rng)
    segments = [segment[start:stop] for segment, (start, stop) in zip(segments, kept, strict=True)]
    swapped = bool(rng.integers(2))
    return segments[::-1] if swapped else segments, SWAPPED if swapped else IN_ORDER
