"""The order of examples: pure functions of (seed, epoch), so that a resumed run sees what it would have seen."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

POOL = 50
"""Batches whose examples are sorted by length together: enough to save padding, few enough to keep chance."""


def grouped_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """All examples, so that each `batch_size` of them in a row have about the same length.

    Examples are shuffled, sorted by length within pools of some batches, and the batches shuffled. A smaller last
    batch stays last.

    >>> grouped_order(np.array([9, 1, 8, 2, 1]), batch_size=2, seed=0, epoch=0)
    array([4, 1, 3, 2, 0])
    """
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(lengths))
    pool = POOL * batch_size
    for start in range(0, len(order), pool):
        part = order[start : start + pool]
        order[start : start + pool] = part[np.argsort(lengths[part], kind="stable")]
    full = len(order) // batch_size * batch_size
    batches = order[:full].reshape(-1, batch_size)
    return np.concatenate((rng.permutation(batches).flatten(), order[full:]))


class GroupedByLength(Sampler[int]):
    """`grouped_order` of the epoch that was set last."""

    def __init__(self, lengths: np.ndarray, batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = np.asarray(lengths), batch_size, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        return iter(grouped_order(self.lengths, self.batch_size, self.seed, self.epoch).tolist())


class LongestFirst(Sampler[int]):
    """For evaluation: little padding, and if memory does not suffice, that shows at once."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.order = np.argsort(-np.asarray(lengths), kind="stable")

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.tolist())


def examples_seen(steps: int, batch_size: int, examples: int) -> int:
    """How many examples `steps` batches hold, the smaller last batch of each epoch counted as it is.

    >>> examples_seen(7, batch_size=4, examples=10)
    24
    """
    per_epoch = -(-examples // batch_size)
    epochs, rest = divmod(steps, per_epoch)
    return epochs * examples + min(rest * batch_size, examples)
