"""Sweeps: tasks × attentions × seeds, each cell trained in a folder of its own, all of them put into one table.

What `lra` and `finetune` share is here: the grid, the folders, resuming, one run, and the loop over all of them. Each
job says in its own file what a cell is made of: its data, its trainer and its score.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from transformers import TrainerCallback, TrainingArguments, set_seed

from nystromformer.checks import LARGEST_SEED, parse_names, parse_whole_numbers
from nystromformer.errors import user_input
from nystromformer.files import write_text
from nystromformer.records import RECORDS, Recorder, read_records
from nystromformer.report.table import Table, print_tables, tables_markdown
from nystromformer.training import SAVE_SECONDS
from nystromformer.training.run import check_folder, finished, run_to_end
from nystromformer.training.shared.arguments import Run, TrainingOptions
from nystromformer.training.shared.callbacks import Curves, Record, ShowProgress
from nystromformer.training.shared.packing import packed_order
from nystromformer.training.shared.recipes import ScoredRecipe
from nystromformer.training.trainer import ExactTrainer, examples_seen

TABLE = "table.md"


class Data(Protocol):
    """What cells of one task read."""

    @property
    def train(self) -> Any: ...

    def noted(self) -> dict[str, Any]:
        """As it stands in `config.json`, so that the same data is known again."""
        ...


D = TypeVar("D", bound=Data)
C = TypeVar("C", bound="Cell")


@dataclass(frozen=True, kw_only=True)
class Cell(Run, ABC, Generic[D]):
    """One run of a sweep."""

    recipe: ScoredRecipe
    task: str

    @property
    def variant(self) -> str:
        """What tells it from other cells of its task and seed."""
        return self.attention

    @property
    def folder(self) -> Path:
        """Where it is in the folder of a sweep."""
        return Path(self.task, self.variant, f"seed-{self.seed}")

    def arguments(self, out: Path, device: str, data: D | None = None) -> TrainingArguments:
        """Without the data they serve to check the settings before anything is read."""
        return self.training_arguments(out, device, self.defaults(data))

    @property
    def title(self) -> str:
        """What people call the task."""
        return self.task

    @abstractmethod
    def defaults(self, data: D | None) -> dict[str, Any]:
        """The recipe's fields of `TrainingArguments`."""

    def check(self, data: D, arguments: TrainingArguments) -> None:
        """Raise `ValueError` for data that can't be trained on as it is asked for."""
        if self.recipe.packed is not None:
            packed_order(data.train, self.recipe.packed, arguments)

    def prepare(self, data: D, out: Path, device: str, *, resume: bool, save_seconds: float) -> None:
        """Whatever has to be there before it is trained, such as weights to start from. Nothing by default."""

    @abstractmethod
    def trainer(self, data: D, arguments: TrainingArguments, callbacks: list[TrainerCallback]) -> ExactTrainer:
        """With a model, ready to train on the data."""

    @abstractmethod
    def score(self, trainer: ExactTrainer, data: D) -> tuple[float, dict[str, Any]]:
        """The result of the trained model, and what its record says besides."""


def run_cell(
    cell: Cell[D], data: D, out: Path, device: str, *, resume: bool, save_seconds: float = SAVE_SECONDS
) -> dict[str, Any]:
    """Train, take the model that was best on the development part, and score it. Returns the record."""
    cell.prepare(data, out, device, resume=resume, save_seconds=save_seconds)
    with user_input():
        arguments = cell.arguments(out, device, data)
        cell.check(data, arguments)

    def make_trainer(recorder: Recorder) -> ExactTrainer:
        title = f"{cell.task} {cell.variant} seed {cell.seed}"
        set_seed(cell.seed)
        return cell.trainer(data, arguments, [ShowProgress(title), Record(recorder), Curves(out)])

    def measure(trainer: ExactTrainer) -> tuple[float, dict[str, Any]]:
        value, details = cell.score(trainer, data)
        steps, examples, packing = trainer.state.global_step, len(trainer.train_dataset), trainer.packing
        in_batches = partial(examples_seen, batch_size=cell.recipe.batch_size, examples=examples)
        return value, {
            "step": steps,
            "best_step": trainer.state.best_global_step,
            "examples_seen": in_batches(steps) if packing is None else packing.seen(steps)[0],
            "train_examples": examples,
            "parameters": trainer.model.num_parameters(),
            **details,
        }

    return run_to_end(
        out,
        arguments,
        job=cell.job,
        config=cell.config() | data.noted(),
        seed=cell.seed,
        resume=resume,
        save_seconds=save_seconds,
        make_trainer=make_trainer,
        measure=measure,
    )


@dataclass(frozen=True, kw_only=True)
class Sweep(TrainingOptions, ABC, Generic[C, D]):
    """What a command was asked for, checked when made."""

    task: str
    attention: str
    data: str
    seeds: str
    """Several, in place of `seed`."""

    def __post_init__(self) -> None:
        for cell in self.cells:
            cell.arguments(self.folder_of(cell), self.device)
            check_folder(self.folder_of(cell), cell.config(), self.resume)

    @cached_property
    @abstractmethod
    def cells(self) -> list[C]:
        """All runs, those of one task in a row."""

    @abstractmethod
    def read(self, cell: C, arguments: TrainingArguments, say: Callable[[str], None]) -> D:
        """The data of the cell's task."""

    @abstractmethod
    def result(self, record: dict[str, Any]) -> str:
        """What a finished run came to, in words."""

    @abstractmethod
    def tables(self, records: Iterable[dict[str, Any]]) -> list[Table]:
        """All finished runs."""

    @cached_property
    def all_seeds(self) -> list[int]:
        return parse_whole_numbers("--seeds", self.seeds, 0, LARGEST_SEED) if self.seeds else [self.seed]

    def names(self, option: str, text: str) -> tuple[str, ...]:
        return parse_names(option, text) if text else ()

    def folder_of(self, cell: C) -> Path:
        """A single run has the whole folder."""
        return self.out if len(self.cells) == 1 else self.out / cell.folder

    def records(self) -> Iterator[dict[str, Any]]:
        folders = [self.folder_of(cell) for cell in self.cells]
        return read_records(*(folder for folder in folders if (folder / RECORDS).exists()))


def run_sweep(sweep: Sweep, say: Callable[[str], None]) -> None:
    """Run all cells. What is finished is left alone; `say` prints on the first process."""
    task, data = None, None
    for cell in sweep.cells:
        folder = sweep.folder_of(cell)
        with user_input():
            arguments = cell.arguments(folder, sweep.device)
            record = finished(folder)
        tell = say if arguments.should_save else _silent
        if record is None:
            if cell.task != task:
                task, data = cell.task, None  # the data of one task at a time
                with user_input():
                    data = sweep.read(cell, arguments, tell)
            record = run_cell(cell, data, folder, sweep.device, resume=sweep.resume, save_seconds=sweep.save_seconds)
        tell(
            f"{cell.title}, {cell.variant}, seed {cell.seed}: {sweep.result(record)}, after {record['step']:,} steps "
            f"and {record['examples_seen']:,} examples"
        )
        if arguments.should_save:
            with user_input():  # the disk may be full
                write_text(sweep.out / TABLE, tables_markdown(sweep.tables(sweep.records())))
    if arguments.should_save:
        print_tables(sweep.tables(sweep.records()))


def _silent(_: str) -> None:
    pass
