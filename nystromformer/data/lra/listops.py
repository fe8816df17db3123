"""ListOps: expressions grown at random, written as Long Range Arena has them, and read."""

import hashlib
from collections.abc import Generator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from nystromformer.data.lra.examples import (
    Examples,
    Sequences,
    Splits,
    check_count,
    described_folder,
    description_of,
    label_of,
    shown,
    table_rows,
)
from nystromformer.data.parallel import Progress, in_order

DIGIT_PROBABILITY = 0.75

MAX_ARGUMENTS = 10

MAX_DEPTH = 10

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")

MIN, MAX, MED, SM = range(len(OPERATORS))

TOKENS = (*"0123456789", *OPERATORS, "]")

FIRST_OPERATOR, CLOSE = 10, 14

CANDIDATES = 4096
"""Expressions grown together. Part of what a seed means: another number gives other examples."""


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """Expressions have more than `min_tokens` and fewer than `max_tokens` tokens. The defaults are LRA's."""

    min_tokens: int = 500
    max_tokens: int = 2000
    max_depth: int = MAX_DEPTH
    max_arguments: int = MAX_ARGUMENTS

    def __post_init__(self) -> None:
        if self.min_tokens < 0 or self.max_tokens < self.min_tokens + 2:
            raise ValueError(
                f"min_tokens={self.min_tokens}, max_tokens={self.max_tokens}: expressions have more tokens than the "
                f"first and fewer than the second, so it must be larger by 2 at least; LRA uses 500 and 2000."
            )
        if self.max_depth < 2:
            raise ValueError(f"max_depth={self.max_depth}: must be at least 2; LRA uses 10.")
        if self.max_arguments < 2:
            raise ValueError(f"max_arguments={self.max_arguments}: must be at least 2; LRA uses 10.")


@dataclass
class Level:
    """All nodes of one depth, of many expressions. The arguments of a node stand together in the next level."""

    tree: np.ndarray  # which expression a node belongs to
    arguments: np.ndarray  # 0 for a digit
    kind: np.ndarray  # the digit, or which operator

    @property
    def is_operator(self) -> np.ndarray:
        return self.arguments > 0

    def keep(self, chosen: np.ndarray) -> "Level":
        return Level(self.tree[chosen], self.arguments[chosen], self.kind[chosen])


def grow(rng: np.random.Generator, options: TreeOptions, candidates: int = CANDIDATES) -> list[Level]:
    """The levels of those of `candidates` random expressions whose length is within bounds, from the root down."""
    levels = []
    tokens = np.zeros(candidates, dtype=np.int64)
    tree = np.arange(candidates)
    for depth in range(1, options.max_depth + 1):
        is_operator = rng.random(len(tree)) >= DIGIT_PROBABILITY
        if depth == options.max_depth:
            is_operator[:] = False
        arguments = np.where(is_operator, rng.integers(2, options.max_arguments + 1, len(tree)), 0)
        kind = np.where(is_operator, rng.integers(0, len(OPERATORS), len(tree)), rng.integers(0, 10, len(tree)))
        levels.append(Level(tree, arguments, kind))
        tokens += np.bincount(tree, weights=1 + is_operator, minlength=candidates).astype(np.int64)
        tree = np.repeat(tree, arguments)
        tree = tree[tokens[tree] < options.max_tokens]  # too long already: will not be kept
    kept = (tokens > options.min_tokens) & (tokens < options.max_tokens)
    return [level.keep(kept[level.tree]) for level in levels]


def evaluate(levels: list[Level]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The value and the number of tokens of each node, level by level from the root down."""
    values, sizes = [], []
    below_value = below_size = np.zeros(0, dtype=np.int64)
    for level in reversed(levels):
        value, size = level.kind.copy(), np.ones(len(level.kind), dtype=np.int64)
        operator = level.is_operator
        if operator.any():
            count = level.arguments[operator]
            start = np.cumsum(count) - count
            value[operator] = apply_operators(level.kind[operator], below_value, start, count)
            size[operator] = 2 + np.add.reduceat(below_size, start)
        values.append(value)
        sizes.append(size)
        below_value, below_size = value, size
    return values[::-1], sizes[::-1]


def apply_operators(kind: np.ndarray, values: np.ndarray, start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """MIN, MAX, MED or SM of each run of `count` values from `start` on.

    >>> runs = dict(values=np.array([2, 9, 4, 7]), start=np.array([0]), count=np.array([4]))
    >>> [int(apply_operators(np.array([kind]), **runs)[0]) for kind in (MIN, MAX, MED, SM)]
    [2, 9, 5, 2]
    """
    run = np.repeat(np.arange(len(start)), count)
    ordered = values[np.lexsort((values, run))]
    median = (ordered[start + (count - 1) // 2] + ordered[start + count // 2]) // 2  # the integer part
    choices = [ordered[start], ordered[start + count - 1], median, np.add.reduceat(values, start) % 10]
    return np.choose(kind, choices)


def write_out(levels: list[Level], sizes: list[np.ndarray]) -> np.ndarray:
    """The tokens of all expressions, one after the other, as positions in `TOKENS`."""
    length = sizes[0]
    tokens = np.empty(int(length.sum()), dtype=np.uint8)
    place = np.cumsum(length) - length  # where each node's first token goes
    for depth, (level, size) in enumerate(zip(levels, sizes, strict=True)):
        operator = level.is_operator
        tokens[place] = np.where(operator, level.kind + FIRST_OPERATOR, level.kind)
        tokens[place[operator] + size[operator] - 1] = CLOSE
        if not operator.any():
            break
        count, below = level.arguments[operator], sizes[depth + 1]
        before = np.cumsum(below) - below  # tokens before each argument, over the whole level
        before -= np.repeat(before[np.cumsum(count) - count], count)  # within its operator
        place = np.repeat(place[operator] + 1, count) + before
    return tokens


def random_examples(seed: int, chunk: int, options: TreeOptions) -> list[tuple[bytes, int]]:
    """Chunk number `chunk` of the endless sequence of examples that belongs to a seed: (expression, value) pairs.

    >>> source, target = random_examples(0, 0, TreeOptions(min_tokens=3, max_tokens=8))[0]
    >>> source, target
    (b'[SM 9 7 ]', 6)
    """
    levels = grow(np.random.default_rng([seed, chunk]), options)
    values, sizes = evaluate(levels)
    ends = np.cumsum(sizes[0])
    words = [token.encode() for token in TOKENS]
    tokens = write_out(levels, sizes).tolist()
    examples, start = [], 0
    for end, value in zip(ends.tolist(), values[0].tolist(), strict=True):
        examples.append((b" ".join([words[token] for token in tokens[start:end]]), value))
        start = end
    return examples


COLUMNS = ("Source", "Target")

FILES = {"train": "basic_train.tsv", "dev": "basic_val.tsv", "test": "basic_test.tsv"}

CLASSES = 10

CODES = {token.encode(): bytes([value]) for value, token in enumerate(TOKENS)} | {b"(": b"", b")": b""}

FRUITLESS_CHUNKS = 500
"""So many chunks of candidates without a new example mean that there are no more."""

LENGTH_TO_COUNT = 40
"""There are more expressions of so many tokens than anyone asks for: longer ones need not be counted."""

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
        wanted = self.train + self.dev + self.test
        there_are = number_of_expressions(self, at_least=2 * wanted)
        if there_are < 2 * wanted:
            raise ValueError(
                f"{wanted:,} different expressions with more than {self.min_tokens} and fewer than {self.max_tokens} "
                f"tokens: there are only {there_are:,}, of which at most half can be drawn; ask for fewer or widen the "
                f"bounds."
            )

    @property
    def trees(self) -> TreeOptions:
        names = TreeOptions.__dataclass_fields__
        return TreeOptions(**{name: getattr(self, name) for name in names})


def number_of_expressions(options: TreeOptions, at_least: int) -> int:
    """How many expressions have the length that `options` ask for, at any depth; counting ends with `at_least`.

    >>> number_of_expressions(TreeOptions(min_tokens=2, max_tokens=5), at_least=10**6)  # an operator and two digits
    400
    """
    longest = min(options.max_tokens - 1, LENGTH_TO_COUNT)
    most = min(options.max_arguments, longest)
    expressions = [0, 10] + [0] * longest  # by the number of tokens; a digit is one of a single token
    lists = [[1] + [0] * longest, *([0] * (longest + 1) for _ in range(most))]  # of so many expressions
    total = 0
    for length in range(1, longest + 1):
        if length > 1:  # an operator and its bracket are two tokens
            expressions[length] = len(OPERATORS) * sum(lists[number][length - 2] for number in range(2, most + 1))
        for number in range(1, most + 1):
            ways = (expressions[last] * lists[number - 1][length - last] for last in range(1, length + 1))
            lists[number][length] = sum(ways)
        if length > options.min_tokens:
            total += expressions[length]
        if total >= at_least:
            break
    return total if longest == options.max_tokens - 1 else max(total, at_least)


def generate(out: Path, options: ListOpsOptions, workers: int | None = None, progress: Progress | None = None) -> None:
    """Write a set into the folder `out`. The same seed gives the same files whatever the number of `workers`.

    `progress` is called with the number of examples made and wanted.
    """
    sizes = {part: getattr(options, part) for part in FILES}
    wanted = sum(sizes.values())
    description = {"task": "listops", "options": asdict(options), "examples": sizes}
    with described_folder(out, description) as folder:
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


def distinct_examples(options: ListOpsOptions, wanted: int, workers: int | None = None) -> Generator[tuple[bytes, int]]:
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
    description = description_of(folder) or {"options": {}}
    usual = asdict(TreeOptions())
    made = {name: description["options"].get(name, usual[name]) for name in usual}
    departures = () if made == usual else (f"{made['min_tokens']} to {made['max_tokens']} tokens",)
    return Splits(**{part: read_part(folder, part, max_length) for part in FILES}, departures=departures)


def read_part(folder: Path, part: str, max_length: int) -> Examples:
    path = folder / FILES[part]
    sources, labels = [], []
    for number, (source, target) in table_rows(path, COLUMNS, header=True):
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
