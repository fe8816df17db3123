"""A tokenizer trained on a corpus: once, and kept beside its shards."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from transformers import PreTrainedTokenizerFast

from nystromformer.data.corpus.build import Report, empty, fingerprint, texts_of
from nystromformer.data.corpus.documents import Reading
from nystromformer.data.tokenizers import read_tokenizer, train_tokenizer

VERSION = 1
"""Counts changes to `train_tokenizer` that change what comes out."""


def corpus_tokenizer(
    files: list[Path], reading: Reading, vocab_size: int, cache: Path, report: Report = lambda share: None
) -> PreTrainedTokenizerFast:
    """The tokenizer for some files in `cache`, trained unless it is there already."""
    name = f"tokenizer-{fingerprint(files, reading, f'trained {VERSION} {vocab_size}')}.json"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{name}.lock"):
        if not (cache / name).exists():
            _train(files, reading, vocab_size, cache / name, report)
    return read_tokenizer(cache / name)


@dataclass(frozen=True)
class Texts:
    """The documents of some files, as often as they are gone through."""

    files: list[Path]
    reading: Reading
    report: Report

    def __iter__(self) -> Iterator[str]:
        for text, share in texts_of(self.files, self.reading):
            self.report(share)
            yield text


def _train(files: list[Path], reading: Reading, vocab_size: int, path: Path, report: Report) -> None:
    texts = Texts(files, reading, report)
    if next(iter(texts), None) is None:
        raise ValueError(empty(files))
    tokenizer = train_tokenizer(texts, vocab_size)
    aside = path.with_name(f".{path.name}.unfinished")
    try:
        tokenizer.backend_tokenizer.save(str(aside))
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
