"""Examples of pretraining: chunks of documents, pairs for sentence order, masked words."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nystromformer.data.corpus.shards import Corpus, Shard

SHORT_CHANCE = 0.1

SHORTEST = 2
"""Tokens: one for each segment."""

PARTS = ("train", "validation")

SEPARATORS = 3
"""[CLS] first [SEP] second [SEP]"""

VALIDATION_SEED = 0
"""Validation examples are the same in all runs, so that their accuracies can be compared."""


@dataclass(frozen=True)
class Chunks:
    """Chunk i is the tokens `starts[i]:stops[i]` of shard `shards[i]`.

    It holds the ends `first[i]:last[i]` of whole sentences before its last one: the places where it may be divided.
    """

    shards: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    first: np.ndarray
    last: np.ndarray
    targets: np.ndarray
    """How many tokens are used of it at most."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def are_pairs(self) -> np.ndarray:
        """Which chunks have two sentences or more. Others can't be divided, so they say nothing about order."""
        return self.last > self.first

    @property
    def tokens(self) -> np.ndarray:
        """How many tokens each example has without special ones."""
        return np.minimum(self.stops - self.starts, self.targets)

    def choose(self, positions: np.ndarray) -> "Chunks":
        return Chunks(*(getattr(self, name)[positions] for name in self.__dataclass_fields__))


def in_validation(hashes: np.ndarray, share: float) -> np.ndarray:
    """Which documents are held out: the same ones in each run, and equal documents on one side.

    >>> in_validation(np.array([0, 2**62, 2**64 - 1], dtype=np.uint64), 0.2)
    array([ True, False, False])
    """
    return hashes < np.uint64(share * 2**64)


def make_chunks(corpus: Corpus, part: str, limit: int, *, seed: int, validation_share: float) -> Chunks:
    """All chunks of a part of the corpus, of at most `limit` tokens after cutting."""
    assert part in PARTS
    rows = []
    for number, shard in enumerate(corpus.shards):
        wanted = in_validation(shard.hashes, validation_share) == (part == "validation")
        rng = np.random.default_rng([seed, PARTS.index(part), number])
        ends = np.concatenate(([0], shard.document_ends)).tolist()
        for document in np.flatnonzero(wanted).tolist():
            of_document = _of_document(shard, ends[document], ends[document + 1], limit, rng)
            rows += [(number, *row) for row in of_document]
    return Chunks(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)


def _of_document(
    shard: Shard, sentence: int, stop: int, limit: int, rng: np.random.Generator
) -> list[tuple[int, int, int, int, int]]:
    """(start, stop, first, last, target) of each chunk of the document with the sentences `sentence:stop`."""
    ends = shard.sentence_ends[sentence:stop].tolist()
    start = int(shard.sentence_ends[sentence - 1]) if sentence else 0
    rows, i = [], 0
    while i < len(ends):
        target = int(rng.integers(SHORTEST, limit + 1)) if rng.random() < SHORT_CHANCE else limit
        j = bisect_left(ends, start + target, lo=i, hi=len(ends) - 1)  # the last sentence of the chunk
        if ends[j] - (ends[j - 1] if j > i else start) > limit:
            # A sentence that fills an example by itself, or several: a table, a list. No token of it is lost.
            if j > i:
                rows.append((start, ends[j - 1], sentence + i, sentence + j - 1, limit))
                start = ends[j - 1]
            rows += [(at, min(at + limit, ends[j]), 0, 0, limit) for at in range(start, ends[j], limit)]
        else:
            is_pair = j > i
            rows.append((start, ends[j], sentence + i, sentence + j, target if is_pair else limit))
        start, i = ends[j], j + 1
    return rows


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
    nothing about order: labeled as swapped, it would be right for nothing.

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


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """Ids of the tokens that examples are framed with."""

    cls: int
    sep: int
    pad: int
    mask: int
    all: tuple[int, ...]
    """These and all other special ones: never masked, never drawn as a random token."""
    vocab_size: int

    def masking(self) -> Masking:
        ordinary = np.setdiff1d(np.arange(self.vocab_size), self.all)
        return Masking(mask_id=self.mask, vocabulary=ordinary)


Key = tuple[int, int]
"""(epoch, index)"""


@dataclass(frozen=True, kw_only=True)
class PretrainingExamples(torch.utils.data.Dataset):
    """A data set whose keys are (epoch, index): each epoch divides, swaps and masks the same chunks anew.

    It keeps no state, so workers, ranks and resumed runs make the same batches. A plain index is one of epoch 0.
    """

    corpus: Corpus
    chunks: Chunks = field(repr=False)
    special: SpecialTokens
    seed: int
    token_types: bool = True
    """Say which segment a token belongs to. Models without token types, as RoBERTa's, can't be told."""

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, key: Key | int) -> dict[str, Tensor]:
        return self.batch([key])

    def __getitems__(self, keys: Sequence[Key | int]) -> dict[str, Tensor]:
        return self.batch(keys)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, special ones included."""
        return self.chunks.tokens + np.where(self.chunks.are_pairs, SEPARATORS, SEPARATORS - 1)

    @cached_property
    def masking(self) -> Masking:
        return self.special.masking()

    @cached_property
    def is_ordinary(self) -> np.ndarray:
        """For each id of the vocabulary, whether it is no special token."""
        ordinary = np.zeros(self.special.vocab_size, dtype=bool)
        ordinary[self.masking.vocabulary] = True
        return ordinary

    def some(self, count: int | None) -> "PretrainingExamples":
        """At most `count` of the examples, spread evenly over the corpus; all for None."""
        if count is None or count >= len(self):
            return self
        return replace(self, chunks=self.chunks.choose(np.arange(count) * len(self) // count))

    def example(self, epoch: int, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """(input_ids, token_type_ids, labels, sentence_order_label)"""
        rng = np.random.default_rng([self.seed, epoch, index])
        chunks = self.chunks
        shard = self.corpus.shards[chunks.shards[index]]
        start, stop = chunks.starts[index], chunks.stops[index]
        tokens = shard.ids[start:stop].astype(np.int64)
        boundaries = shard.sentence_ends[chunks.first[index] : chunks.last[index]] - start
        segments, order = sentence_order(tokens, boundaries, int(chunks.targets[index]), rng)
        ids: list[np.ndarray | list[int]] = [[self.special.cls]]
        types: list[np.ndarray | list[int]] = [[0]]
        for number, segment in enumerate(segments):
            ids += [segment, [self.special.sep]]
            types += [np.full(len(segment) + 1, number)]
        input_ids = np.concatenate(ids)
        hidden, labels = mask_tokens(input_ids, self.is_ordinary[input_ids], self.masking, rng)
        return hidden, np.concatenate(types), labels, order

    def batch(self, keys: Sequence[Key | int]) -> dict[str, Tensor]:
        """`input_ids`, `token_type_ids` and `labels` (b, n), padded to the longest; `sentence_order_label` (b,).

        `attention_mask`, True for a token, is there only where something is padded: attention is faster without.
        """
        pairs = [(0, key) if isinstance(key, (int, np.integer)) else key for key in keys]
        examples = [self.example(int(epoch), int(index)) for epoch, index in pairs]
        ids, types, labels, orders = zip(*examples, strict=True)
        length = max(map(len, ids))
        batch = {}
        for name, arrays, value in (
            ("input_ids", ids, self.special.pad),
            ("token_type_ids", types, 0),
            ("labels", labels, IGNORED),
        ):
            padded = np.full((len(arrays), length), value, dtype=np.int64)
            for row, array in zip(padded, arrays, strict=True):
                row[: len(array)] = array
            batch[name] = torch.from_numpy(padded)
        if not self.token_types:
            del batch["token_type_ids"]
        batch["sentence_order_label"] = torch.tensor(orders)
        lengths = np.array([len(example[0]) for example in examples])
        if lengths.min() < length:
            batch["attention_mask"] = torch.from_numpy(np.arange(length) < lengths[:, None])
        return batch


def pretraining_examples(
    corpus: Corpus,
    special: SpecialTokens,
    *,
    max_length: int,
    seed: int,
    validation_share: float = 0.2,
    token_types: bool = True,
) -> tuple[PretrainingExamples, PretrainingExamples]:
    """The examples of the training part and those of the validation part, divided by document."""
    made = {}
    for part, part_seed in (("train", seed), ("validation", VALIDATION_SEED)):
        chunks = make_chunks(corpus, part, max_length - SEPARATORS, seed=part_seed, validation_share=validation_share)
        if not len(chunks):
            raise ValueError(
                f"the corpus has {corpus.documents:,} documents, and none of them fell to the {part} part: give more "
                f"documents (a text file is divided by --documents), or change --validation-share {validation_share}."
            )
        made[part] = PretrainingExamples(
            corpus=corpus, chunks=chunks, special=special, seed=part_seed, token_types=token_types
        )
    return made["train"], made["validation"]
