"""ListOps: the value of a nested expression of digits, in LRA's own files.

`basic_{train,val,test}.tsv` with the header `Source<TAB>Target`, as the release has them and `generate` writes them.
The release puts parentheses around every pair; they carry nothing and are dropped.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from nystromformer.data.lra.examples import Examples, Sequences, Splits
from nystromformer.data.lra.folders import check_count, whole_folder
from nystromformer.data.lra.listops_trees import TOKENS, TreeOptions, random_examples
from nystromformer.data.lra.parallel import in_order
from nystromformer.data.lra.tables import label_of, rows_of, shown

COLUMNS = ("Source", "Target")
FILES = {"train": "basic_train.tsv", "dev": "basic_val.tsv", "test": "basic_test.tsv"}
CLASSES = 10
CODES = {token.encode(): bytes([value]) for value, token in enumerate(TOKENS)} | {b"(": b"", b")": b""}
FRUITLESS_CHUNKS = 500
"""So many chunks of candidates without a new example mean that there are no more."""
FEW = 2_000
"""Fewer examples than this are made sooner than another process starts."""


@dataclass(frozen=True, kw_only=True)
class ListOpsOptions(TreeOptions):
    """The defaults are LRA's."""

    train: int = 96_000
    dev: int = 2_000
    test: int = 2_000
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in FILES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1 example.")

    @property
    def trees(self) -> TreeOptions:
        names = TreeOptions.__dataclass_fields__
        return TreeOptions(**{name: getattr(self, name) for name in names})


def generate(
    out: Path,
    options: ListOpsOptions,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a set into the folder `out`. The same seed gives the same files whatever the number of `workers`.

    `progress` is called with the number of examples made and wanted.
    """
    sizes = {part: getattr(options, part) for part in FILES}
    wanted = sum(sizes.values())
    description = {"task": "listops", "options": asdict(options), "examples": sizes}
    with whole_folder(out, description) as folder:
        examples = distinct_examples(options, wanted, workers)
        made = 0
        for part, size in sizes.items():
            with open(folder / FILES[part], "wb") as file:
                file.write("\t".join(COLUMNS).encode() + b"\n")
                for _ in range(size):
                    source, target = next(examples)
                    file.write(b"%s\t%d\n" % (source, target))
                    made += 1
                    if progress and (made % 256 == 0 or made == wanted):
                        progress(made, wanted)
        examples.close()


def distinct_examples(options: ListOpsOptions, wanted: int, workers: int | None = None) -> Iterator[tuple[bytes, int]]:
    """Examples without repetition, in the order of their chunks."""
    seen: set[bytes] = set()
    fruitless = 0
    if wanted < FEW:
        workers = 1
    work = partial(random_examples, options.seed, options=options.trees)
    for chunk in in_order(work, count(), workers):
        before = len(seen)
        for source, target in chunk:
            key = hashlib.blake2b(source, digest_size=16).digest()
            if key not in seen:
                seen.add(key)
                yield source, target
        fruitless = fruitless + 1 if len(seen) == before else 0
        if fruitless == FRUITLESS_CHUNKS:
            raise ValueError(
                f"only {len(seen):,} of {wanted:,} different expressions with more than {options.min_tokens} and "
                f"fewer than {options.max_tokens} tokens were found; ask for fewer or widen the bounds."
            )


def read(folder: Path, max_length: int) -> Splits:
    """Read the three files of a folder, LRA's or ours. Expressions longer than `max_length` tokens are cut."""
    return Splits(**{part: read_part(folder, part, max_length) for part in FILES})


def read_part(folder: Path, part: str, max_length: int) -> Examples:
    path = folder / FILES[part]
    sources, labels = [], []
    for number, (source, target) in rows_of(path, COLUMNS, header=True):
        sources.append(encode(source, path, number)[:max_length])
        labels.append(label_of(target, CLASSES, path, number))
    check_count(folder, path, part, len(labels))
    return Examples((Sequences.of(sources),), np.array(labels, dtype=np.int64))


def encode(source: bytes, path: Path, number: int) -> bytes:
    """One byte a token: its position in `TOKENS`.

    >>> list(encode(b"( ( ( [MAX 2 ) 9 ) ] )", Path("a.tsv"), 1)) == list(encode(b"[MAX 2 9 ]", Path("a.tsv"), 1))
    True
    """
    try:
        codes = b"".join(map(CODES.__getitem__, source.split()))
    except KeyError as error:
        raise ValueError(
            f"{path}, line {number}: token {shown(error.args[0])}; must be a digit, {', '.join(TOKENS[10:])}, or a "
            f"parenthesis: is this a ListOps file?"
        ) from error
    if not codes or source.count(b"[") != source.count(b"]"):
        raise ValueError(f"{path}, line {number}: an expression with unequal brackets; the line was cut short.")
    return codes
