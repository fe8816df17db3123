"""The texts of a task as a model reads them: tokenized, and padded batch by batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nystromformer.attention.shared.varlen import lengths_to_offsets
from nystromformer.data.glue import Texts, TextSplits
from nystromformer.progress import count_bar
from nystromformer.training.shared.recipes import FinetuningRecipe

CHUNK = 1_000
"""Texts that are tokenized at once."""


@dataclass(frozen=True)
class TokenizedTexts:
    """A data set for `ExactTrainer`. Its batches are ready, and always with the mask that the encoder must see."""

    ids: list[np.ndarray]
    types: list[np.ndarray] | None
    labels: np.ndarray | None
    padding: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.ids])

    @property
    def tokens(self) -> np.ndarray:
        """How many tokens each text has; of a pair, both together, as it is one sequence."""
        return self.lengths

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return self.batch([position])

    def __getitems__(self, positions: Sequence[int]) -> dict[str, Tensor]:
        return self.batch(positions)

    def batch(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and, where the model has them, `token_type_ids` (b, n); `labels` (b,)."""
        chosen = [self.ids[position] for position in positions]
        found = {
            "input_ids": _padded(chosen, self.padding),
            "attention_mask": _padded([np.ones(len(ids), dtype=np.int64) for ids in chosen], 0),
        }
        if self.types is not None:
            found["token_type_ids"] = _padded([self.types[position] for position in positions], 0)
        if self.labels is not None:
            found["labels"] = torch.from_numpy(self.labels[np.asarray(positions)])
        return found

    def packed(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """The same texts in one row (1, n), with `cu_seq_lens_q` where each begins and the last one ends."""
        row = lambda texts: torch.from_numpy(np.concatenate([texts[position] for position in positions])).long()[None]
        lengths = torch.tensor([len(self.ids[position]) for position in positions])
        found = {"input_ids": row(self.ids), "cu_seq_lens_q": lengths_to_offsets(lengths)}
        if self.types is not None:
            found["token_type_ids"] = row(self.types)
        if self.labels is not None:
            found["labels"] = torch.from_numpy(self.labels[np.asarray(positions)])
        return found


def limited(splits: TextSplits, recipe: FinetuningRecipe, with_unlabeled: bool) -> TextSplits:
    """The examples that are used; test parts without labels only where they are to be predicted."""
    return TextSplits(
        splits.train.some(recipe.train_examples),
        {name: part.some(recipe.dev_examples) for name, part in splits.dev.items()},
        {
            name: part if part.labels is None else part.some(recipe.test_examples)
            for name, part in splits.test.items()
            if part.labels is not None or with_unlabeled
        },
        splits.labels,
    )


def tokenize(
    texts: Texts,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    with_types: bool,
    progress: Callable[[int, int], None] = lambda done, wanted: None,
) -> TokenizedTexts:
    """All texts of a part, each cut at `max_length` tokens; of a pair, the longer text is cut first."""
    ids: list[np.ndarray] = []
    types: list[np.ndarray] = []
    for start in range(0, len(texts), CHUNK):
        part = slice(start, start + CHUNK)
        encoded = tokenizer(
            texts.first[part],
            None if texts.second is None else texts.second[part],
            truncation=True,
            max_length=max_length,
            padding=False,
            return_token_type_ids=with_types,
            return_attention_mask=False,
            verbose=False,
        )
        ids += [np.array(row, dtype=np.int32) for row in encoded["input_ids"]]
        if with_types:
            types += [np.array(row, dtype=np.uint8) for row in encoded["token_type_ids"]]
        progress(len(ids), len(texts))
    padding = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return TokenizedTexts(ids, types if with_types else None, texts.labels, padding)


@dataclass(frozen=True, kw_only=True)
class FinetuningData:
    """The parts of a data set as the model reads them, and the texts they come from."""

    splits: TextSplits
    train: TokenizedTexts
    dev: dict[str, TokenizedTexts]
    test: dict[str, TokenizedTexts]
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(
        cls, title: str, splits: TextSplits, tokenizer: PreTrainedTokenizerBase, max_length: int, with_types: bool
    ) -> "FinetuningData":
        """All parts tokenized, with a progress bar for each."""
        tokenized: dict[str, TokenizedTexts] = {}
        for name, part in {"train": splits.train, **splits.dev, **splits.test}.items():
            with count_bar(f"tokenizing {title} {name}") as progress:
                tokenized[name] = tokenize(part, tokenizer, max_length, with_types, progress)
        return cls(
            splits=splits,
            train=tokenized["train"],
            dev={name: tokenized[name] for name in splits.dev},
            test={name: tokenized[name] for name in splits.test},
            tokenizer=tokenizer,
        )

    @property
    def is_regression(self) -> bool:
        return self.splits.labels is None

    def noted(self) -> dict[str, str]:
        return {"data": self.splits.fingerprint()}


def _padded(rows: list[np.ndarray], padding: int) -> Tensor:
    filled = np.full((len(rows), max(len(row) for row in rows)), padding, dtype=np.int64)
    for row, target in zip(rows, filled, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(filled)
