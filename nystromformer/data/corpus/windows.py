"""Windows: documents of a corpus cut into inputs of an encoder, special tokens included, as many as are needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nystromformer.data.corpus.examples import in_validation
from nystromformer.data.corpus.shards import empty, text_hash, texts_of
from nystromformer.data.corpus.text import Reading

OF_A_DOCUMENT = 4
"""At most so many windows: passages of one document, and still many documents."""

CHARACTERS = 12
"""Of a token, at most: what is beyond the last window need not be tokenized."""


@dataclass(frozen=True)
class Windows(torch.utils.data.Dataset):
    """Inputs of at most `max_length` tokens and at least half as many, since few tokens need no approximation."""

    ids: list[np.ndarray] = field(repr=False)
    document: np.ndarray
    """Which one each window is of."""
    pad: int
    max_length: int

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([len(each) for each in self.ids])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batch([index])

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return self.batch(indices)

    def batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """`input_ids` (b, n), padded to the longest, and `attention_mask` where something is padded."""
        length = max(len(self.ids[index]) for index in indices)
        padded = np.full((len(indices), length), self.pad, dtype=np.int64)
        for row, index in zip(padded, indices, strict=True):
            row[: len(self.ids[index])] = self.ids[index]
        batch = {"input_ids": torch.from_numpy(padded)}
        lengths = self.lengths[list(indices)]
        if lengths.min() < length:
            batch["attention_mask"] = torch.from_numpy(np.arange(length) < lengths[:, None])
        return batch

    def some(self, count: int) -> "Windows":
        """At most `count`, the first windows of documents first, so that they come from many."""
        _, starts = np.unique(self.document, return_index=True)
        place = np.arange(len(self)) - np.repeat(starts, np.diff([*starts, len(self)]))
        kept = np.sort(np.argsort(place, kind="stable")[:count])
        return Windows([self.ids[index] for index in kept], self.document[kept], self.pad, self.max_length)

    def digest(self) -> str:
        return sha256(b"".join(sha256(each.tobytes()).digest() for each in self.ids)).hexdigest()[:16]


def read_windows(
    files: list[Path],
    reading: Reading,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    train: int,
    held_out: int,
    share: float,
    report: Callable[[float], None] = lambda share: None,
) -> tuple[Windows, Windows]:
    """The first windows of a corpus to train on and to judge by, as many as are wanted or there are.

    `share` of the documents is held out: the same ones whatever else is asked for.
    """
    wanted = {False: train, True: held_out}
    found: dict[bool, list[np.ndarray]] = {False: [], True: []}
    document: dict[bool, list[int]] = {False: [], True: []}
    longest, number = 0, 0
    for number, (text, done) in enumerate(texts_of(files, reading), start=1):
        part = share >= 1 or bool(in_validation(np.array([text_hash(text)], dtype=np.uint64), share)[0])
        if len(found[part]) < wanted[part]:
            own = windows_of(text, tokenizer, max_length)
            longest = max([longest, *map(len, own)])
            long_enough = [each for each in own if len(each) >= max(1, max_length // 2)]
            found[part] += long_enough
            document[part] += [number] * len(long_enough)
        ready = [len(found[part]) / count for part, count in wanted.items() if count]
        report(min(1.0, max(done, min(ready))))
        if min(ready) >= 1:
            break
    if not number:
        raise ValueError(empty(files))
    for part, name in ((False, "to train on"), (True, "held out")):
        if wanted[part] and not found[part]:
            raise ValueError(
                f"--max-length {max_length}: none of the documents {name} (of {number:,}) has half as many tokens, the "
                f"longest has {longest}: give longer documents, more of them, or a smaller --max-length."
            )
    made = [
        Windows(found[part][:count], np.array(document[part][:count]), tokenizer.pad_token_id, max_length)
        for part, count in wanted.items()
    ]
    return made[0], made[1]


def windows_of(text: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[np.ndarray]:
    """The first windows of a document, each framed by the special tokens."""
    text = text[: CHARACTERS * max_length * OF_A_DOCUMENT]
    parts = tokenizer(text, truncation=True, max_length=max_length, return_overflowing_tokens=True)["input_ids"]
    return [np.array(part, dtype=np.int64) for part in parts[:OF_A_DOCUMENT]]
