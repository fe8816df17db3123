"""Labelled token sequences of different lengths, kept compactly and handed out as padded batches."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

PADDING = 0
FIRST_TOKEN = 1
"""Ids of tokens start here, so that no token is taken for padding: a black pixel is 1, not 0."""


@dataclass(frozen=True)
class Sequences:
    """Byte-valued sequences, one after the other in one array: sequence i is `values[ends[i - 1]:ends[i]]`.

    >>> Sequences.of([b"ab", b"cde"])[1]
    array([ 99, 100, 101], dtype=uint8)
    """

    values: np.ndarray  # uint8
    ends: np.ndarray

    @classmethod
    def of(cls, sequences: Iterable[bytes]) -> "Sequences":
        joined, ends = bytearray(), []
        for sequence in sequences:
            joined += sequence
            ends.append(len(joined))
        return cls(np.frombuffer(joined, dtype=np.uint8), np.array(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.values[self.ends[index - 1] if index else 0 : self.ends[index]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)


@dataclass(frozen=True)
class Examples(torch.utils.data.Dataset):
    """A data set for `torch.utils.data.DataLoader`, which asks it for whole batches (`__getitems__`).

    One sequence an example, or two where a pair is to be classified. Examples whose token value 0 means padding, as in
    the released implementation, are made with `zero_is_padding`.

    >>> examples = Examples((Sequences.of([b"ab", b"cde"]),), labels=np.array([0, 1]))
    >>> batch = examples.batch([0, 1])
    >>> batch["input_ids"]
    tensor([[ 98,  99,   0],
            [100, 101, 102]])
    >>> batch["attention_mask"]
    tensor([[ True,  True, False],
            [ True,  True,  True]])
    """

    parts: tuple[Sequences, ...]
    labels: np.ndarray
    index: np.ndarray | None = None  # which examples, in which order; all of them by default
    zero_is_padding: bool = False

    def __len__(self) -> int:
        return len(self.labels if self.index is None else self.index)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return self.batch([position])

    def __getitems__(self, positions: Sequence[int]) -> dict[str, Tensor]:
        return self.batch(positions)

    @property
    def lengths(self) -> np.ndarray:
        """The length of each example; of a pair, the longer one."""
        lengths = np.max([part.lengths for part in self.parts], axis=0)
        return lengths if self.index is None else lengths[self.index]

    @property
    def tokens(self) -> np.ndarray:
        """How many tokens each example has; of a pair, both together."""
        tokens = np.sum([part.lengths for part in self.parts], axis=0)
        return tokens if self.index is None else tokens[self.index]

    @property
    def classes(self) -> np.ndarray:
        """The label of each example."""
        return self.labels if self.index is None else self.labels[self.index]

    def choose(self, positions: np.ndarray | slice) -> "Examples":
        """Some of the examples, by position, in the order given."""
        index = np.arange(len(self.labels)) if self.index is None else self.index
        return replace(self, index=index[positions])

    def some(self, count: int | None, seed: int = 0) -> "Examples":
        """At most `count` of the examples, drawn at random, the same for each seed; all for None."""
        if count is None or count >= len(self):
            return self
        return self.choose(np.sort(np.random.default_rng(seed).permutation(len(self))[:count]))

    def batch(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids` (b, n), or (b, 2, n) of pairs, padded to the longest; `labels` (b,).

        `attention_mask`, True for a token, is there only where something is padded: attention is faster without.
        """
        rows = np.asarray(positions) if self.index is None else self.index[np.asarray(positions)]
        sequences = [[part[row] for part in self.parts] for row in rows]
        length = max(len(sequence) for pair in sequences for sequence in pair)
        ids = np.full((len(rows), len(self.parts), length), PADDING, dtype=np.int64)
        for pair, padded in zip(sequences, ids, strict=True):
            for sequence, row in zip(pair, padded, strict=True):
                row[: len(sequence)] = sequence
                row[: len(sequence)] += 0 if self.zero_is_padding else FIRST_TOKEN
        input_ids = torch.from_numpy(ids)
        if len(self.parts) == 1:
            input_ids = input_ids.squeeze(1)
        batch = {"input_ids": input_ids, "labels": torch.from_numpy(self.labels[rows])}
        mask = input_ids != PADDING
        if not mask.all():
            batch["attention_mask"] = mask
        return batch

    def packed(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids` (1, n), all sequences one after the other, both of a pair together; `labels` (b,).

        `cu_seq_lens_q` says where each sequence begins and the last one ends.

        >>> examples = Examples((Sequences.of([b"ab", b"cde"]),), labels=np.array([0, 1]))
        >>> examples.packed([1, 0])["input_ids"], examples.packed([1, 0])["cu_seq_lens_q"]
        (tensor([[100, 101, 102,  98,  99]]), tensor([0, 3, 5], dtype=torch.int32))
        """
        if self.zero_is_padding:
            raise ValueError("zero_is_padding=True with packed examples: must be False, since nothing is masked there.")
        rows = np.asarray(positions) if self.index is None else self.index[np.asarray(positions)]
        sequences = [part[row] for row in rows for part in self.parts]
        ends = np.cumsum([0, *map(len, sequences)], dtype=np.int32)
        return {
            "input_ids": torch.from_numpy(np.concatenate(sequences).astype(np.int64) + FIRST_TOKEN)[None],
            "cu_seq_lens_q": torch.from_numpy(ends),
            "labels": torch.from_numpy(self.labels[rows]),
        }


@dataclass(frozen=True)
class Splits:
    train: Examples
    dev: Examples
    test: Examples

    def fingerprint(self) -> str:
        """A short hash of all examples, to know the same data again."""
        digest = hashlib.blake2b(digest_size=8)
        for examples in (self.train, self.dev, self.test):
            for part in examples.parts:
                digest.update(part.values.tobytes())
                digest.update(part.ends.tobytes())
            digest.update(examples.labels.tobytes())
            index = np.arange(len(examples)) if examples.index is None else examples.index
            digest.update(index.tobytes())
        return digest.hexdigest()


def as_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The collator that goes with `Examples`: its batches are ready."""
    return batch


def hold_out(examples: Examples, count: int, seed: int = 0) -> tuple[Examples, Examples]:
    """Divide examples at random into those that stay and `count` that are held out, the same for each seed."""
    order = np.random.default_rng(seed).permutation(len(examples))
    return examples.choose(np.sort(order[count:])), examples.choose(np.sort(order[:count]))
