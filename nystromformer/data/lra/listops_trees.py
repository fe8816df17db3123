"""Random ListOps expressions by Long Range Arena's rules, many at a time.

A node is a digit with probability 0.75, else an operator with 2 to 10 arguments; nodes of the last level are digits.
An expression is kept when its number of tokens lies strictly between two bounds. Most are far too short, so thousands
are grown together, one level after the other, and only those that are kept are written out and evaluated.
"""

from dataclasses import dataclass

import numpy as np

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
