"""GLUE's tasks and IMDB: which columns hold what, in the official files and in the Hub's, how each is scored, and the
labeled texts, alone or in pairs, as readers hand them on. Complaints name the file, the row and what to do."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of the columns with the texts and the label; `second` only for pairs."""

    first: str
    label: str
    second: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.first,) if self.second is None else (self.first, self.second)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What readers, training and reports need to know."""

    title: str
    folder: str
    """The name of its folder in the official layout; the Hub's folder has the task's own name."""
    official: Columns | None = None
    """Columns of the official TSV files; None where there are none."""
    hub: Columns
    """Columns of the Hub's parquet files."""
    labels: tuple[str, ...] | None = ("0", "1")
    """As official files write them, in the order of the Hub's class numbers; None for numbers."""
    metrics: tuple[str, ...] = ("accuracy",)
    """The first is the paper's, and decides which model is the best."""
    dev: dict[str, str] = field(default_factory=lambda: {"dev": "validation"})
    """Development parts: names of the official files and of the Hub's. The first decides; none: a tenth is held out."""
    test: dict[str, str] = field(default_factory=lambda: {"test": "test"})
    hub_id: str = "nyu-mll/glue"
    headerless: tuple[str, ...] = ()
    """All columns in order, in files of labeled parts that have no header."""
    has_damage: bool = False
    """The published files have lines that lack columns, which everyone leaves out, and some empty texts."""


SENTENCE = Columns(first="sentence", label="label")
SENTENCES = Columns(first="sentence1", second="sentence2", label="label")
QUESTION = Columns(first="question", second="sentence", label="label")

TASKS: dict[str, Task] = {
    "sst2": Task(title="SST-2", folder="SST-2", official=SENTENCE, hub=SENTENCE),
    "mrpc": Task(
        title="MRPC",
        folder="MRPC",
        official=Columns(first="#1 String", second="#2 String", label="Quality"),
        hub=SENTENCES,
        metrics=("f1", "accuracy"),
    ),
    "qnli": Task(title="QNLI", folder="QNLI", official=QUESTION, hub=QUESTION, labels=ENTAILMENT),
    "qqp": Task(
        title="QQP",
        folder="QQP",
        official=Columns(first="question1", second="question2", label="is_duplicate"),
        hub=Columns(first="question1", second="question2", label="label"),
        metrics=("f1", "accuracy"),
        has_damage=True,
    ),
    "mnli": Task(
        title="MNLI",
        folder="MNLI",
        official=Columns(first="sentence1", second="sentence2", label="gold_label"),
        hub=Columns(first="premise", second="hypothesis", label="label"),
        labels=("entailment", "neutral", "contradiction"),
        dev={"dev_matched": "validation_matched", "dev_mismatched": "validation_mismatched"},
        test={"test_matched": "test_matched", "test_mismatched": "test_mismatched"},
    ),
    "imdb": Task(
        title="IMDB", folder="imdb", hub=Columns(first="text", label="label"), dev={}, hub_id="stanfordnlp/imdb"
    ),
    "cola": Task(
        title="CoLA",
        folder="CoLA",
        official=SENTENCE,
        hub=SENTENCE,
        metrics=("matthews",),
        headerless=("source", "label", "star", "sentence"),
    ),
    "rte": Task(title="RTE", folder="RTE", official=SENTENCES, hub=SENTENCES, labels=ENTAILMENT),
    "stsb": Task(
        title="STS-B",
        folder="STS-B",
        official=Columns(first="sentence1", second="sentence2", label="score"),
        hub=SENTENCES,
        labels=None,
        metrics=("pearson", "spearman"),
    ),
    "wnli": Task(title="WNLI", folder="WNLI", official=SENTENCES, hub=SENTENCES),
}
"""In the order of the paper's table, then the tasks that it has not."""

CUSTOM = "custom"
"""The name of a task that is nothing but the user's files."""


def task_name(given: str) -> str:
    """Our name of a task, however it is written.

    >>> task_name("SST-2"), task_name("sts_b")
    ('sst2', 'stsb')
    """
    return given.strip().lower().replace("-", "").replace("_", "")


LARGEST_NUMBER = float(np.finfo(np.float32).max)
"""Of labels that are numbers, which models compute in float32."""
LONGEST_TEXT = 1_000_000
"""In characters, hundreds of times what a model reads of it: a longer one is a file without line ends."""


@dataclass(frozen=True)
class Row:
    """One example as a file has it."""

    where: str
    """File and line, for complaints."""
    index: str
    """What predictions call it."""
    texts: tuple[object, ...]
    label: object
    """None in parts without labels."""


@dataclass(frozen=True)
class Texts:
    """One part of a data set.

    >>> Texts(["good film", "bad film"], None, np.array([1, 0])).some(1).first
    ['good film']
    """

    first: list[str]
    second: list[str] | None
    labels: np.ndarray | None
    """Classes or numbers; None where the part has no labels."""
    index: list[str] = field(default_factory=list)
    left_out: int = 0
    """Rows that were damaged in a way that the published files are known for."""

    def __len__(self) -> int:
        return len(self.first)

    def choose(self, positions: Sequence[int] | np.ndarray) -> "Texts":
        """Some of the examples, by position, in the order given."""
        pick = lambda values: [values[position] for position in positions]
        return replace(
            self,
            first=pick(self.first),
            second=None if self.second is None else pick(self.second),
            labels=None if self.labels is None else self.labels[np.asarray(positions)],
            index=pick(self.index) if self.index else [],
        )

    def some(self, count: int | None, seed: int = 0) -> "Texts":
        """At most `count` of the examples, drawn at random, the same for each seed; all for None."""
        if count is None or count >= len(self):
            return self
        return self.choose(np.sort(np.random.default_rng(seed).permutation(len(self))[:count]))

    def hold_out(self, share: float, seed: int = 0) -> tuple["Texts", "Texts"]:
        """Divide at random into what stays and a share that is held out, the same for each seed."""
        if len(self) < 2:
            raise ValueError(f"{len(self)} training examples: must be at least 2, to hold some out for development.")
        count = max(1, int(share * len(self)))
        order = np.random.default_rng(seed).permutation(len(self))
        return self.choose(np.sort(order[count:])), self.choose(np.sort(order[:count]))


@dataclass(frozen=True)
class TextSplits:
    train: Texts
    dev: dict[str, Texts]
    """By name; the first one decides which model is the best."""
    test: dict[str, Texts]
    labels: tuple[str, ...] | None
    """Names of the classes; None for numbers."""

    def fingerprint(self) -> str:
        """A short hash of all examples with labels, to know the same data again. Others change no score."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.train, *self.dev.values(), *self.test.values()):
            if part.labels is not None:
                for text in (*part.first, *(part.second or ())):
                    digest.update(text.encode(errors="surrogatepass") + b"\0")
                digest.update(part.labels.tobytes())
        return digest.hexdigest()


def collect(
    rows: Iterable[Row], columns: tuple[str, ...], labels: tuple[str, ...] | None, *, allow_empty: bool = False
) -> Texts:
    """All rows of a part. `labels` are names of classes in order, or None for numbers."""
    texts: list[tuple[str, ...]] = []
    values: list[int | float | None] = []
    index: list[str] = []
    classes = None if labels is None else {name: number for number, name in enumerate(labels)}
    for row in rows:
        texts.append(
            tuple(_text(value, name, row, allow_empty) for name, value in zip(columns, row.texts, strict=True))
        )
        values.append(None if row.label is None else label_of(row, classes))
        index.append(row.index)
    has_labels = bool(values) and values[0] is not None
    kind = np.float32 if labels is None else np.int64
    return Texts(
        [pair[0] for pair in texts],
        [pair[1] for pair in texts] if len(columns) == 2 else None,
        np.array(values, dtype=kind) if has_labels else None,
        index,
    )


def label_of(row: Row, classes: dict[str, int] | None) -> int | float:
    """A label as a class or a number. Classes may be given by name or, as the Hub does, by number.

    >>> label_of(Row("a.tsv, line 2", "0", ("text",), "not_entailment"), {"entailment": 0, "not_entailment": 1})
    1
    """
    given = row.label
    if classes is None:
        try:
            number = float(str(given))
        except ValueError:
            number = np.nan
        if not abs(number) <= LARGEST_NUMBER:
            raise ValueError(
                f"{row.where}: label {shown(given)}; must be a number of at most {LARGEST_NUMBER:.4g}: fix or remove "
                f"the row."
            )
        return number
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool) and 0 <= given < len(classes):
        return int(given)
    name = str(given).strip()
    if name in classes:
        return classes[name]
    unlabeled = " Is this a part without labels?" if name == "-1" else ""
    raise ValueError(
        f"{row.where}: label {shown(given)}; must be one of {', '.join(classes)}: fix or remove the row.{unlabeled}"
    )


def _text(value: object, column: str, row: Row, allow_empty: bool) -> str:
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise ValueError(
            f"{row.where}: {len(value):,} characters in column {column}; must be at most {LONGEST_TEXT:,}: cut the "
            f"text, or divide it into rows."
        )
    if isinstance(value, str) and (value.strip() or allow_empty):
        return value
    if value is None or value == "" or isinstance(value, str):
        raise ValueError(f"{row.where}: the text in column {column} is empty; fill it in or remove the row.")
    raise ValueError(f"{row.where}: column {column} holds {shown(value)}; must be a text: is this the right column?")


def shown(value: object, length: int = 40) -> str:
    """
    >>> shown("a" * 50)
    "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…'"
    """
    text = repr(value)
    return text if len(text) <= length + 2 else text[: length + 1] + "…" + text[-1]
