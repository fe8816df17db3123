"""Documents cut into chunks: sentences of one document in a row that make one example.

By ALBERT's rules a chunk collects sentences until it reaches its target, which is the whole length for nine chunks in
ten and a random one for the rest. It then goes to the pair maker, which cuts off what is too much.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from nystromformer.data.corpus.build import Corpus
from nystromformer.data.corpus.shards import Shard

SHORT_CHANCE = 0.1
SHORTEST = 2
"""Tokens: one for each segment."""
PARTS = ("train", "validation")


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
