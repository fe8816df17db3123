"""Image: CIFAR-10 in grey, pixel by pixel, in the Hub's layout (`img`, `label`)."""

from pathlib import Path

import numpy as np

from nystromformer.data.lra.examples import Examples, Sequences, Splits
from nystromformer.data.lra.parquet import checked_label, rows_of
from nystromformer.data.lra.pictures import pixels_of

SIZE = 32
CLASSES = 10
TRAIN_SHARE = 0.9
"""LRA keeps the last tenth of the training part for development: 45,000 and 5,000."""


def read(folder: Path, max_length: int) -> Splits:
    train, test = (read_part(folder, part, max_length) for part in ("train", "test"))
    kept = int(TRAIN_SHARE * len(train))
    return Splits(train.choose(slice(None, kept)), train.choose(slice(kept, None)), test)


def read_part(folder: Path, part: str, max_length: int) -> Examples:
    pictures, labels = [], []
    for where, image, label in rows_of(folder, part, ("img", "label")):
        if not isinstance(image, dict) or not isinstance(image.get("bytes"), bytes):
            raise ValueError(f"{where}: img is not an encoded picture; must be a copy of the Hub's uoft-cs/cifar10.")
        pictures.append(pixels_of(image["bytes"], where, SIZE).tobytes()[:max_length])
        labels.append(checked_label(label, CLASSES, where))
    return Examples((Sequences.of(pictures),), np.array(labels, dtype=np.int64))
