"""Packed batches: about so many tokens per step instead of so many examples, and no padding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import TrainingArguments


class Packable(Protocol):
    """A data set whose examples can be packed."""

    @property
    def tokens(self) -> np.ndarray:
        """How many tokens each example has."""
        ...

    def __len__(self) -> int: ...

    def packed(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """Examples as one row: `input_ids` (1, n), `cu_seq_lens_q`, `labels` (b,)."""
        ...


def steps_per_epoch(tokens: int, per_step: int) -> int:
    """Steps of at most `per_step` tokens on average that so many make.

    >>> steps_per_epoch(10_500, 1_000)
    11
    """
    return max(1, -(-tokens // per_step))


def packed_batches(tokens: np.ndarray, batches: int, seed: int, epoch: int) -> list[np.ndarray]:
    """All examples in `batches` with about as many tokens each; none is empty where there are as many examples.

    Examples are shuffled, and the row of their tokens is cut into equal parts: an example belongs to the part that it
    begins in. So there are as many batches in each epoch, and none is off by more than the longest example.

    >>> [batch.tolist() for batch in packed_batches(np.array([9, 1, 8, 2, 1]), batches=2, seed=0, epoch=0)]
    [[2, 4, 3], [0, 1]]
    """
    order = np.random.default_rng([seed, epoch]).permutation(len(tokens))
    starts = np.cumsum(tokens[order]) - tokens[order]
    number = np.arange(1, batches)
    cuts = np.searchsorted(starts * batches // tokens.sum(), number)
    # Where an example is longer than a part, that one would be empty: it gets the next example.
    after = np.clip(np.maximum.accumulate(cuts - number), 0, len(tokens) - batches)
    return np.split(order, after + number)


class PackedOrder(Sampler[tuple[int, ...]]):
    """The examples of each batch, of the epoch that was set last: a function of (seed, epoch) alone.

    A step has `per_step` tokens, divided into `shares` batches: for processes and for accumulated gradients.
    """

    def __init__(self, tokens: np.ndarray, per_step: int, shares: int, seed: int) -> None:
        self.tokens, self.seed, self.epoch = np.asarray(tokens, dtype=np.int64), seed, 0
        total, longest = int(self.tokens.sum()), int(self.tokens.max())
        if per_step < longest * shares:
            raise ValueError(
                f"--packed {per_step}: must be at least {longest * shares}, {shares} times the longest example's "
                f"tokens; give more, or a smaller --max-length."
            )
        self.shares, self.batches = shares, shares * steps_per_epoch(total, per_step)
        if self.batches > len(self.tokens):
            raise ValueError(
                f"--packed {per_step}: {len(self.tokens)} examples for {self.batches} batches of an epoch, {shares} "
                f"per step; give more tokens per step, or more examples."
            )

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (tuple(batch.tolist()) for batch in self._order(self.epoch))

    def seen(self, steps: int) -> tuple[int, int]:
        """The examples and the tokens of so many steps."""
        epochs, rest = divmod(steps * self.shares, self.batches)
        begun = np.concatenate([np.arange(0), *self._order(epochs)[:rest]])
        return epochs * len(self.tokens) + len(begun), int(epochs * self.tokens.sum() + self.tokens[begun].sum())

    def _order(self, epoch: int) -> list[np.ndarray]:
        return packed_batches(self.tokens, self.batches, self.seed, epoch)


def packed_order(examples: Packable, per_step: int, arguments: TrainingArguments) -> PackedOrder:
    """The order of a run with these arguments. Raises `ValueError` for examples that do not fit."""
    shares = arguments.world_size * arguments.gradient_accumulation_steps
    return PackedOrder(examples.tokens, per_step, shares, arguments.data_seed)


@dataclass(frozen=True)
class PackedBatches(Dataset):
    """A data set that is asked for whole batches: its indices are those that `PackedOrder` gives."""

    examples: Packable

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, batch: Sequence[int]) -> dict[str, Tensor]:
        return self.examples.packed(batch)

    def __getitems__(self, batches: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        return self.examples.packed([position for batch in batches for position in batch])
