"""Batches for pretraining: each example is a pure function of (seed, epoch, index)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from nystromformer.data.corpus.build import Corpus
from nystromformer.data.corpus.chunks import Chunks, make_chunks
from nystromformer.data.corpus.masking import IGNORED, Masking, mask_tokens
from nystromformer.data.corpus.pairs import sentence_order

SEPARATORS = 3
"""[CLS] first [SEP] second [SEP]"""
VALIDATION_SEED = 0
"""Validation examples are the same in all runs, so that their accuracies can be compared."""


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
        ids, types = [[self.special.cls]], [[0]]
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
        length = max(len(example[0]) for example in examples)
        filling = {"input_ids": self.special.pad, "token_type_ids": 0, "labels": IGNORED}
        batch = {}
        for position, (name, value) in enumerate(filling.items()):
            padded = np.full((len(examples), length), value, dtype=np.int64)
            for row, example in zip(padded, examples, strict=True):
                row[: len(example[position])] = example[position]
            batch[name] = torch.from_numpy(padded)
        if not self.token_types:
            del batch["token_type_ids"]
        batch["sentence_order_label"] = torch.tensor([example[3] for example in examples])
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
