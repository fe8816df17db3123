"""Masked language modelling by BERT's rules."""

from dataclasses import dataclass

import numpy as np

IGNORED = -100
"""The label of tokens that are not to be predicted."""


@dataclass(frozen=True, kw_only=True)
class Masking:
    """How tokens are hidden. Of those chosen, what is neither masked nor replaced stays as it is."""

    mask_id: int
    vocabulary: np.ndarray
    """The ids that a random token is drawn from."""
    share: float = 0.15
    masked: float = 0.8
    replaced: float = 0.1


def mask_tokens(
    ids: np.ndarray, maskable: np.ndarray, masking: Masking, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """`ids` (n,) with some tokens hidden, and labels that are the hidden ones' ids and -100 elsewhere.

    `maskable` (n,) is False for special tokens. Of the others exactly `share` are chosen, and at least one.

    >>> ids = np.arange(100, 120)
    >>> masking = Masking(mask_id=4, vocabulary=np.arange(5, 30000))
    >>> hidden, labels = mask_tokens(ids, ids > 100, masking, np.random.default_rng(0))
    >>> labels[labels != IGNORED], hidden[labels != IGNORED]
    (array([110, 112, 115]), array([1234,    4,  115]))
    """
    candidates = np.flatnonzero(maskable)
    count = min(max(1, round(len(candidates) * masking.share)), len(candidates))
    chosen = rng.choice(candidates, count, replace=False)
    hidden, labels = ids.copy(), np.full_like(ids, IGNORED)
    labels[chosen] = ids[chosen]
    draw = rng.random(count)
    hidden[chosen[draw < masking.masked]] = masking.mask_id
    replaced = chosen[(draw >= masking.masked) & (draw < masking.masked + masking.replaced)]
    hidden[replaced] = masking.vocabulary[rng.integers(len(masking.vocabulary), size=len(replaced))]
    return hidden, labels
