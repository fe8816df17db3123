"""GLUE's tasks and IMDB: which columns hold what, in the official files and in the Hub's, and how each is scored."""

from dataclasses import dataclass, field

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
