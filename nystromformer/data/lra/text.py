"""Text: the sentiment of IMDB reviews, byte by byte, in the Hub's layout (`text`, `label`)."""

from pathlib import Path

import numpy as np

from nystromformer.data.lra.examples import Examples, Sequences, Splits, hold_out
from nystromformer.data.lra.parquet import checked_label, rows_of

CLASSES = 2
DEV_SHARE = 0.1
"""IMDB has no development part. The release develops on the test part; we hold out a tenth of the training part."""


def read(folder: Path, max_length: int, dev_is_test: bool = False) -> Splits:
    train, test = (read_part(folder, part, max_length) for part in ("train", "test"))
    if dev_is_test:
        return Splits(train, test, test)
    return Splits(*hold_out(train, max(1, int(DEV_SHARE * len(train)))), test)


def read_part(folder: Path, part: str, max_length: int) -> Examples:
    texts, labels = [], []
    for where, text, label in rows_of(folder, part, ("text", "label")):
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where}: text {text!r}; must be a text that is not empty: remove the row.")
        texts.append(text.encode()[:max_length])
        labels.append(checked_label(label, CLASSES, where))
    return Examples((Sequences.of(texts),), np.array(labels, dtype=np.int64))
