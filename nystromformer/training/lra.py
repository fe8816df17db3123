"""Long Range Arena: one run by a recipe, and the sweep that `lra` asks for."""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from transformers import TrainerCallback, TrainingArguments

from nystromformer.checks import check_choice, parse_names
from nystromformer.data.hub import local_folder
from nystromformer.data.lra import TASKS, Examples, Splits, as_is, listops, pathfinder, task_folder
from nystromformer.data.lra.examples import check_options
from nystromformer.data.lra.listops import ListOpsOptions
from nystromformer.data.lra.pathfinder import PathfinderSetOptions
from nystromformer.errors import user_input
from nystromformer.models.lra import LongRangeArenaConfig, NystromformerForLongRangeArena, lra_config
from nystromformer.progress import count_bar
from nystromformer.report.table import Table
from nystromformer.report.tables import lra_tables
from nystromformer.training.run import check_folder
from nystromformer.training.self_pretraining import FOLDER, SelfPretraining, SelfPretrainingRecipe
from nystromformer.training.shared.arguments import on_cpu, processes
from nystromformer.training.shared.callbacks import Clock, metric_function
from nystromformer.training.shared.recipes import LRA_RECIPES, LraRecipe
from nystromformer.training.starts import Start
from nystromformer.training.sweep import Cell, Sweep, run_cell
from nystromformer.training.trainer import ExactTrainer, cost

ATTENTIONS = (
    "standard",
    "nystrom-64",
    "linformer-256",
    "longformer-257",
    "reformer-2",
    "performer-256",
    "linear",
)
"""The columns of `lra all`."""

GENERATED = Path("data/lra")
"""Where data that was not given is made."""

LEGACY_TEXT_LENGTH = 1_000
"""Where the released script cuts Text."""


@dataclass(frozen=True, kw_only=True)
class Legacy:
    """What the released code does differently, each a switch. All are off by default: the correct behavior."""

    padding_id: bool = False
    """The token value 0 counts as padding: black pixels vanish."""
    pooling: bool = False
    """The mean over tokens divides by the padded length, not by their number."""
    text_length: bool = False
    """Text is cut at 1,000 bytes, not at 4,000."""
    dev_is_test: bool = False
    """Text is developed on its test part."""
    no_seed: bool = False
    """A seed from the system's entropy, another one in each run (it is recorded)."""
    one_cycle: bool = False
    """A one-cycle schedule: it starts at 1/25 of the learning rate and cycles Adam's β₁ 0.95 → 0.85 → 0.95."""
    drop_last: bool = False
    """Evaluations leave out the last batch where it is smaller."""

    def names(self) -> list[str]:
        return [switch.name for switch in fields(self) if getattr(self, switch.name)]


@dataclass(frozen=True, kw_only=True)
class LraCell(Cell[Splits]):
    """One task, attention and seed."""

    job = "lra"
    recipe: LraRecipe
    legacy: Legacy
    given_start: Start | None = None
    """Another run, to start from."""

    @property
    def title(self) -> str:
        return TASKS[self.task].title

    def config(self) -> dict[str, Any]:
        own = super().config() | {"legacy": self.legacy.names()}
        own.pop("given_start")
        return own | ({} if self.given_start is None else self.given_start.noted())

    def defaults(self, data: Splits | None) -> dict[str, Any]:
        return self.recipe.arguments()

    def model_config(self) -> LongRangeArenaConfig:
        length = self.recipe.room if self.legacy.pooling else None
        fields = self.recipe.model_fields(TASKS[self.task])
        return lra_config(attention=self.attention, pooled_length=length, **fields)

    @property
    def pretraining(self) -> SelfPretraining | None:
        """What is to be done before."""
        if not self.recipe.self_pretrain:
            return None
        recipe = SelfPretrainingRecipe.before(self.recipe, TASKS[self.task].masked)
        same = {name: value for name, value in vars(self).items() if name not in ("recipe", "legacy", "given_start")}
        return SelfPretraining(**same, recipe=recipe)

    def prepare(self, data: Splits, out: Path, device: str, *, resume: bool, save_seconds: float) -> None:
        if self.pretraining is not None:
            run_cell(self.pretraining, data, out / FOLDER, device, resume=resume, save_seconds=save_seconds)
        if self.given_start is not None:
            with user_input():
                self.given_start.check_data(data.fingerprint())

    def start(self, out: Path) -> Start | None:
        """What it starts from, after `prepare`."""
        return self.given_start if self.pretraining is None else Start.self_pretrained(out / FOLDER)

    def trainer(self, data: Splits, arguments: TrainingArguments, callbacks: list[TrainerCallback]) -> ExactTrainer:
        config, start = self.model_config(), self.start(Path(arguments.output_dir))
        return ExactTrainer(
            model=NystromformerForLongRangeArena(config) if start is None else start.classifier(config),
            args=arguments,
            data_collator=as_is,
            train_dataset=data.train,
            eval_dataset=data.dev,
            compute_metrics=metric_function(("accuracy",)),
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
            callbacks=[Clock(), *callbacks],
            scheduler=partial(one_cycle, warmup=arguments.warmup_steps) if self.legacy.one_cycle else None,
            packed=self.recipe.packed,
        )

    def score(self, trainer: ExactTrainer, data: Splits) -> tuple[float, dict[str, Any]]:
        """On the whole test set."""
        metrics = trainer.predict(data.test, metric_key_prefix="test").metrics
        start = self.start(Path(trainer.args.output_dir))
        return metrics["test_accuracy"], {
            "test_examples": len(data.test),
            "dev_accuracy": trainer.state.best_metric,
            "majority": majority(data.test),
            **cost(trainer, data.train, self.recipe.batch_size),
            **({} if start is None else start.budget()),
        }


@dataclass(frozen=True, kw_only=True)
class LraSweep(Sweep[LraCell, Splits]):
    """What `lra` was asked for."""

    legacy: Legacy
    from_run: str
    """Whose self-pretraining is used; empty: that of none."""
    after: str
    """Whose trained model is trained on; empty: that of none."""

    def __post_init__(self) -> None:
        if self.legacy.no_seed and (self.resume or processes() > 1):
            given = "--resume" if self.resume else f"{processes()} processes"
            raise ValueError(f"--legacy-no-seed with {given}: they would need the same seed; give one with --seed.")
        starts = {"--from": self.from_run, "--after": self.after, "--self-pretrain": "self_pretrain" in self.changes}
        if len(given_starts := [option for option, value in starts.items() if value]) > 1:
            raise ValueError(f"{' with '.join(given_starts)}: a run has one start; give one of them.")
        before = any(cell.pretraining for cell in self.cells)
        if "packed" in self.changes and (before or self.legacy.padding_id):
            other = "--legacy-padding-id" if self.legacy.padding_id else "--self-pretrain"
            raise ValueError(f"--packed with {other}: packed sequences have no padding and no mask; leave one out.")
        for cell in self.cells:
            if cell.recipe.embedding_start == "picture":
                check_picture(cell)
            cell.model_config()  # with a position table, which some attentions need
            if cell.given_start is not None:
                cell.given_start.check_model(cell.config())
            if cell.pretraining is not None:
                check_folder(self.folder_of(cell) / FOLDER, cell.pretraining.config(), self.resume)
            if self.legacy.padding_id and (self.from_run or cell.pretraining):
                raise ValueError(
                    "--legacy-padding-id with self-pretraining: the id of padding stands for masked tokens, and must "
                    "not be a token's; leave one of them out."
                )
        super().__post_init__()

    @cached_property
    def cells(self) -> list[LraCell]:
        tasks = tuple(TASKS) if self.task == "all" else parse_names("TASK", self.task)
        for task in tasks:
            check_choice("TASK", task, (*TASKS, "all"))
        attentions = ATTENTIONS if self.attention == "all" else self.names("--attention", self.attention)
        if not attentions:
            attentions = ATTENTIONS if self.task == "all" else ("nystrom-64",)
        dtype = self.dtype or ("float32" if self.preset != "paper" or on_cpu(self.device) else "float16")
        start = Start.self_pretrained(self.from_run) if self.from_run else None
        start = Start.trained(self.after) if self.after else start
        seeds = [secrets.randbelow(2**31) for _ in self.all_seeds] if self.legacy.no_seed else self.all_seeds
        return [
            LraCell(
                task=task,
                attention=attention,
                seed=seed,
                preset=self.preset,
                recipe=self.recipe_of(task),
                legacy=self.legacy,
                given_start=start,
                settings=self.parsed_settings,
                dtype=dtype,
            )
            for task in tasks
            for attention in attentions
            for seed in seeds
        ]

    def recipe_of(self, task: str) -> LraRecipe:
        recipe = LRA_RECIPES[self.preset][task].changed(**self.changes)
        return replace(recipe, self_pretrain=None) if self.from_run or self.after else recipe

    def read(self, cell: LraCell, arguments: TrainingArguments, say: Callable[[str], None]) -> Splits:
        with arguments.main_process_first():  # which generates what is not there
            folder = self.data_folder(cell, say)
        return read_splits(cell.task, folder, cell.recipe, cell.legacy)

    def data_folder(self, cell: LraCell, say: Callable[[str], None]) -> Path:
        """Where the data of a cell's task is: as given, on the Hub, or generated here."""
        task = TASKS[cell.task]
        if self.data:
            folder = local_folder(self.data)
            inner = task_folder(folder, cell.task)
            if inner is not None or len({cell.task for cell in self.cells}) == 1:
                return inner or folder
        if task.hub_id is not None:
            return local_folder(task.hub_id)
        if cell.recipe.data is None:
            raise ValueError(
                f"{cell.task}: no --data given; {task.source.format(name=cell.task)}, and give its folder."
            )
        folder = GENERATED / f"{cell.task}-{self.preset}"
        if not folder.exists():
            say(f"making {folder} once, since no --data was given")
            generate(cell.task, folder, cell.recipe.data)
        check_options(folder, asdict(cell.recipe.data))
        return folder

    def result(self, record: dict[str, Any]) -> str:
        return f"{100 * record['value']:.2f} % of {record['test_examples']:,} test examples right"

    def tables(self, records: Iterable[dict[str, Any]]) -> list[Table]:
        return lra_tables(records)


def check_picture(cell: LraCell) -> None:
    """Raise `ValueError` where tokens are not the pixels of whole pictures."""
    pictures = {name: task.side**2 for name, task in TASKS.items() if task.side}
    if cell.recipe.room != pictures.get(cell.task):
        allowed = " or ".join(f"{name} with {pixels:,} tokens" for name, pixels in pictures.items())
        raise ValueError(
            f"--embedding-start picture with {cell.task} of {cell.recipe.max_length:,} tokens: must be {allowed}, a "
            f"whole picture; give --embedding-start random."
        )


def generate(task: str, folder: Path, data: ListOpsOptions | PathfinderSetOptions, workers: int | None = None) -> None:
    """Make the data of a task, with a progress bar."""
    maker: Any = {"listops": listops.generate, "pathfinder": pathfinder.generate}[task]
    with count_bar(f"{task} examples") as progress:
        maker(folder, data, workers, progress)


def read_splits(task: str, folder: Path, recipe: LraRecipe, legacy: Legacy) -> Splits:
    """The data of a task as the recipe uses it. Raises `ValueError` for data that is not as it should be."""
    max_length = recipe.max_length
    if task == "text":
        max_length = min(max_length, LEGACY_TEXT_LENGTH) if legacy.text_length else max_length
        splits = TASKS[task].read(folder, max_length, dev_is_test=legacy.dev_is_test)
    else:
        splits = TASKS[task].read(folder, max_length)
    return replace(
        splits,
        train=_used(splits.train, recipe.train_examples, legacy, None),
        dev=_used(splits.dev, recipe.dev_examples, legacy, recipe.batch_size),
        test=_used(splits.test, recipe.test_examples, legacy, recipe.batch_size),
    )


def _used(examples: Examples, count: int | None, legacy: Legacy, drop_last: int | None) -> Examples:
    examples = replace(examples.some(count), zero_is_padding=legacy.padding_id)
    if legacy.drop_last and drop_last:
        full = len(examples) // drop_last * drop_last
        if not full:
            raise ValueError(
                f"--legacy-drop-last: {len(examples)} examples make no full batch of {drop_last}; "
                f"use a smaller --batch-size."
            )
        examples = examples.choose(slice(full))
    return examples


def majority(examples: Examples) -> float:
    """The accuracy of always saying the most frequent class."""
    return float(np.bincount(examples.classes).max() / len(examples))


def one_cycle(optimizer: Optimizer, steps: int, warmup: float) -> LRScheduler:
    """The released schedule. Like any one-cycle schedule of PyTorch it moves β₁ against the learning rate."""
    peak = optimizer.param_groups[0]["lr"]
    rising = max(warmup, 2) / steps  # PyTorch divides by the steps of a phase less one
    return OneCycleLR(optimizer, max_lr=peak, total_steps=steps, pct_start=rising, anneal_strategy="linear")
