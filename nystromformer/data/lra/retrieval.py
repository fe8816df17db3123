"""Retrieval: does one paper of the ACL Anthology cite the other? Both byte by byte, in LRA's own files.

`new_aan_pairs.{train,eval,test}.tsv`: label, id, id, text, text, separated by tabs, without a header. The release has
texts as Python bytes (`b'…'`); they are read as they stand, as LRA does.
"""

from pathlib import Path

import numpy as np

from nystromformer.data.lra.examples import Examples, Sequences, Splits
from nystromformer.data.lra.tables import label_of, rows_of

COLUMNS = ("label", "id1", "id2", "text1", "text2")
FILES = {
    "train": "new_aan_pairs.train.tsv",
    "dev": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
CLASSES = 2


def read(folder: Path, max_length: int) -> Splits:
    return Splits(**{part: read_part(folder / name, max_length) for part, name in FILES.items()})


def read_part(path: Path, max_length: int) -> Examples:
    firsts, seconds, labels = [], [], []
    for number, (label, _, _, first, second) in rows_of(path, COLUMNS, header=False):
        first, second = unquoted(first)[:max_length], unquoted(second)[:max_length]
        if not first or not second:
            raise ValueError(f"{path}, line {number}: an empty text; remove the line.")
        firsts.append(first)
        seconds.append(second)
        labels.append(label_of(label, CLASSES, path, number))
    return Examples((Sequences.of(firsts), Sequences.of(seconds)), np.array(labels, dtype=np.int64))


def unquoted(field: bytes) -> bytes:
    '''A field without the quotation marks that writers of tables put around texts that contain some.

    >>> unquoted(b'"b""it\\'s"""'), unquoted(b'"A" or "B"')
    (b'b"it\\'s"', b'"A" or "B"')
    '''
    inner = field[1:-1]
    quoted = len(field) > 1 and field[:1] == field[-1:] == b'"' and inner.count(b'"') == 2 * inner.count(b'""')
    return inner.replace(b'""', b'"') if quoted else field
