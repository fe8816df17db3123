"""The tasks of Long Range Arena that are read as others published them: Text, Retrieval and Image.

Complaints name the file, the line and what to do.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nystromformer.data.hub import nearby, parquet_files, parquet_rows
from nystromformer.data.lra.examples import Examples, Sequences, Splits, hold_out, label_of, pixels_of, table_rows

TEXT_CLASSES = 2
TEXT_DEV_SHARE = 0.1
"""IMDB has no development part. The release develops on the test part; we hold out a tenth of the training part."""
IMAGE_SIZE = 32
IMAGE_CLASSES = 10
IMAGE_TRAIN_SHARE = 0.9
"""LRA keeps the last tenth of the training part for development: 45,000 and 5,000."""
RETRIEVAL_COLUMNS = ("label", "id1", "id2", "text1", "text2")
RETRIEVAL_FILES = {
    "train": "new_aan_pairs.train.tsv",
    "dev": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
RETRIEVAL_CLASSES = 2
RELEASED_PAIRS = 147_086
"""To train on."""


def read_text(folder: Path, max_length: int, dev_is_test: bool = False) -> Splits:
    """Text: the sentiment of IMDB reviews, byte by byte, in the Hub's layout (`text`, `label`)."""
    train, test = (_text_part(folder, part, max_length) for part in ("train", "test"))
    if dev_is_test:
        return Splits(train, test, test)
    return Splits(*hold_out(train, max(1, int(TEXT_DEV_SHARE * len(train)))), test)


def _text_part(folder: Path, part: str, max_length: int) -> Examples:
    texts, labels = [], []
    for where, text, label in _labeled(folder, part, "text"):
        if not isinstance(text, str) or not text:
            raise ValueError(f"{where}: text {text!r}; must be a text that is not empty: remove the row.")
        texts.append(text.encode()[:max_length])
        labels.append(checked_label(label, TEXT_CLASSES, where))
    return Examples((Sequences.of(texts),), np.array(labels, dtype=np.int64))


def read_image(folder: Path, max_length: int) -> Splits:
    """Image: CIFAR-10 in gray, pixel by pixel, in the Hub's layout (`img`, `label`)."""
    train, test = (_image_part(folder, part, max_length) for part in ("train", "test"))
    kept = int(IMAGE_TRAIN_SHARE * len(train))
    return Splits(train.choose(slice(None, kept)), train.choose(slice(kept, None)), test)


def _image_part(folder: Path, part: str, max_length: int) -> Examples:
    pictures, labels = [], []
    for where, image, label in _labeled(folder, part, "img"):
        if not isinstance(image, dict) or not isinstance(image.get("bytes"), bytes):
            raise ValueError(f"{where}: img is not an encoded picture; must be a copy of the Hub's uoft-cs/cifar10.")
        pictures.append(pixels_of(image["bytes"], where, IMAGE_SIZE).tobytes()[:max_length])
        labels.append(checked_label(label, IMAGE_CLASSES, where))
    return Examples((Sequences.of(pictures),), np.array(labels, dtype=np.int64))


def read_retrieval(folder: Path, max_length: int) -> Splits:
    """Retrieval: does one paper of the ACL Anthology cite the other? Both byte by byte, in LRA's own files.

    `new_aan_pairs.{train,eval,test}.tsv`: label, id, id, text, text, separated by tabs, without a header. The release
    has texts as Python bytes (`b'…'`); they are read as they stand, as LRA does.
    """
    parts = {part: _retrieval_part(folder / name, max_length) for part, name in RETRIEVAL_FILES.items()}
    pairs = len(parts["train"])
    return Splits(**parts, departures=() if pairs == RELEASED_PAIRS else (f"another set, of {pairs:,} pairs",))


def _retrieval_part(path: Path, max_length: int) -> Examples:
    firsts, seconds, labels = [], [], []
    for number, (label, _, _, first, second) in table_rows(path, RETRIEVAL_COLUMNS, header=False):
        first, second = unquoted(first)[:max_length], unquoted(second)[:max_length]
        if not first or not second:
            raise ValueError(f"{path}, line {number}: an empty text; remove the line.")
        firsts.append(first)
        seconds.append(second)
        labels.append(label_of(label, RETRIEVAL_CLASSES, path, number))
    return Examples((Sequences.of(firsts), Sequences.of(seconds)), np.array(labels, dtype=np.int64))


def unquoted(field: bytes) -> bytes:
    '''A field without the quotation marks that writers of tables put around texts that contain some.

    >>> unquoted(b'"b""it\\'s"""'), unquoted(b'"A" or "B"')
    (b'b"it\\'s"', b'"A" or "B"')
    '''
    inner = field[1:-1]
    quoted = len(field) > 1 and field[:1] == field[-1:] == b'"' and inner.count(b'"') == 2 * inner.count(b'""')
    return inner.replace(b'""', b'"') if quoted else field


def _labeled(folder: Path, part: str, column: str) -> Iterator[tuple[str, Any, Any]]:
    """(where, cell of `column`, label) of each row of all files of a part, such as `plain_text/train-*.parquet`."""
    files = parquet_files(folder, part)
    if not files:
        raise ValueError(
            f"{folder}: no {part}-*.parquet in it or in its subfolders; must be a copy of the Hub's data set, but "
            f"{nearby(folder / part)}"
        )
    for path in files:
        for number, cells in parquet_rows(path, (column, "label")):
            yield f"{path}, row {number}", cells[column], cells["label"]


def checked_label(label: object, classes: int, where: str) -> int:
    if not isinstance(label, int) or not 0 <= label < classes:
        raise ValueError(f"{where}: label {label!r}; must be 0 to {classes - 1}: is this the right data set?")
    return label
