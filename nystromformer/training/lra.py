"""Long Range Arena: the recipes of each task, and one run by one of them."""

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from transformers import TrainingArguments, set_seed
from transformers.trainer_utils import EvalPrediction

from nystromformer.data.lra import TASKS, Examples, Splits, as_is
from nystromformer.data.lra.listops import ListOpsOptions
from nystromformer.data.lra.pathfinder import PathfinderSetOptions
from nystromformer.models.lra import NystromformerForLongRangeArena, lra_config
from nystromformer.records import RESULTS, Recorder, result_in
from nystromformer.training.arguments import processes, training_arguments
from nystromformer.training.callbacks import Curves, Record, ShowProgress
from nystromformer.training.trainer import ExactTrainer, examples_seen, finish, prepare_folder, train

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


@dataclass(frozen=True, kw_only=True)
class Legacy:
    """What the released code does differently, each a switch. All are off by default: the correct behaviour."""

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
class Recipe:
    """How a task is trained and tested. The defaults are what the paper's recipes share."""

    steps: int
    batch_size: int
    warmup: int
    eval_every: int
    max_length: int
    """Longer inputs are cut. The position table has room for the next power of two."""
    learning_rate: float = 1e-4
    attention_dropout: float = 0.1
    """Of the attention matrix, in the attention that has one: standard."""
    train_examples: int | None = None
    dev_examples: int | None = None
    test_examples: int | None = None
    """At most so many are used; None is all."""
    data: ListOpsOptions | PathfinderSetOptions | None = None
    """How data is made where none is given."""

    @property
    def positions(self) -> int:
        return 1 << (self.max_length - 1).bit_length()

    def arguments(self) -> dict[str, object]:
        """Fields of `TrainingArguments`."""
        return {
            "max_steps": self.steps,
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup,
            "lr_scheduler_type": "linear",
            "optim": "adamw_torch",
            "adam_epsilon": 1e-6,
            "weight_decay": 0.0,
            "max_grad_norm": 0.0,
            "eval_strategy": "steps",
            "eval_steps": self.eval_every,
            "save_strategy": "steps",
            "save_steps": self.eval_every,
            "logging_steps": self.eval_every,
            "metric_for_best_model": "accuracy",
            "greater_is_better": True,
            "load_best_model_at_end": True,
        }


PAPER = {
    "listops": Recipe(steps=5_000, batch_size=32, warmup=1_000, eval_every=50, max_length=2_000, data=ListOpsOptions()),
    "text": Recipe(steps=20_000, batch_size=32, warmup=8_000, eval_every=500, max_length=4_000),
    "retrieval": Recipe(steps=30_000, batch_size=32, warmup=800, eval_every=300, max_length=4_000),
    "image": Recipe(steps=35_000, batch_size=256, warmup=175, eval_every=175, max_length=1_024),
    "pathfinder": Recipe(
        steps=62_400, batch_size=256, warmup=312, eval_every=312, max_length=1_024, data=PathfinderSetOptions()
    ),
}


# Attention dropout is off in the small recipes: without it exact attention never writes its matrix down.
BRIEF = {"steps": 600, "batch_size": 16, "warmup": 60, "eval_every": 200, "learning_rate": 1e-3}

LITTLE = {"attention_dropout": 0.0, "dev_examples": 500, "test_examples": 2_000}

MINI = {
    "listops": Recipe(
        **BRIEF | {"learning_rate": 2e-3, "eval_every": 100},
        **LITTLE,
        max_length=256,
        data=ListOpsOptions(min_tokens=64, max_tokens=256, train=20_000, dev=2_000, test=2_000),
    ),
    "text": Recipe(**BRIEF, **LITTLE, max_length=1_000),
    "retrieval": Recipe(**BRIEF | {"batch_size": 8}, **LITTLE, max_length=1_000),
    "image": Recipe(**BRIEF, **LITTLE, max_length=1_024),
    "pathfinder": Recipe(
        **BRIEF, **LITTLE, max_length=1_024, data=PathfinderSetOptions(count=20_000, contour_length=6)
    ),
}


SMALLEST = {"steps": 4, "batch_size": 4, "warmup": 1, "eval_every": 2, "max_length": 128, "learning_rate": 1e-3}

FEW = {"attention_dropout": 0.0, "train_examples": 16, "dev_examples": 6, "test_examples": 10}

SMOKE = {
    "listops": Recipe(**SMALLEST, **FEW, data=ListOpsOptions(min_tokens=16, max_tokens=64, train=16, dev=6, test=10)),
    "text": Recipe(**SMALLEST, **FEW),
    "retrieval": Recipe(**SMALLEST, **FEW),
    "image": Recipe(**SMALLEST, **FEW),
    "pathfinder": Recipe(**SMALLEST, **FEW, data=PathfinderSetOptions(count=40)),
}


RECIPES: dict[str, dict[str, Recipe]] = {"paper": PAPER, "mini": MINI, "smoke": SMOKE}

TEXT_LENGTH = 1_000
"""Where the released script cuts Text."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Everything that decides what comes out."""

    task: str
    attention: str
    seed: int
    preset: str
    recipe: Recipe
    legacy: Legacy
    settings: dict[str, object]
    """Fields of `TrainingArguments` that the user has set."""
    dtype: str

    def config(self) -> dict[str, object]:
        """As it is noted in the folder and in each record."""
        recipe = {name: value for name, value in vars(self.recipe).items() if name != "data" and value is not None}
        return {
            "task": self.task,
            "attention": self.attention,
            "seed": self.seed,
            "preset": self.preset,
            **recipe,
            "legacy": self.legacy.names(),
            "settings": self.settings,
            "dtype": self.dtype,
            "processes": processes(),
        }


def read_splits(task: str, folder: Path, recipe: Recipe, legacy: Legacy) -> Splits:
    """The data of a task as the recipe uses it. Raises `ValueError` for data that is not as it should be."""
    max_length = recipe.max_length
    if task == "text":
        max_length = min(max_length, TEXT_LENGTH) if legacy.text_length else max_length
        splits = TASKS[task].read(folder, max_length, dev_is_test=legacy.dev_is_test)
    else:
        splits = TASKS[task].read(folder, max_length)
    return Splits(
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


def build_model(cell: Cell) -> NystromformerForLongRangeArena:
    task, recipe = TASKS[cell.task], cell.recipe
    set_seed(cell.seed)
    config = lra_config(
        attention=cell.attention,
        vocab_size=task.vocabulary,
        num_labels=task.classes,
        problem_type="single_label_classification",
        max_position_embeddings=recipe.positions,
        attention_probs_dropout_prob=recipe.attention_dropout,
        pair=task.pair,
        pooled_length=recipe.positions if cell.legacy.pooling else None,
    )
    return NystromformerForLongRangeArena(config)


def arguments_of(cell: Cell, out: Path, device: str) -> TrainingArguments:
    return training_arguments(
        out,
        batch_size=cell.recipe.batch_size,
        seed=cell.seed,
        device=device,
        dtype=cell.dtype,
        defaults=cell.recipe.arguments(),
        settings=cell.settings,
    )


def prepare_cell(
    cell: Cell, splits: Splits, out: Path, arguments: TrainingArguments, resume: bool
) -> dict[str, object]:
    """Note the configuration in the folder and return it. Raises `ValueError` where another run is there."""
    config = {**cell.config(), "data": splits.fingerprint()}
    with arguments.main_process_first():  # the others find the folder as it shall be
        if arguments.should_save:
            prepare_folder(out, config, resume)
    return config


def run_cell(
    cell: Cell, splits: Splits, out: Path, arguments: TrainingArguments, config: dict[str, object]
) -> dict[str, object]:
    """Train, take the model that was best on the dev set, and test it on the whole test set. Returns the record."""
    recorder = Recorder(out, job="lra", config=config, seed=cell.seed)
    trainer = ExactTrainer(
        model=build_model(cell),
        args=arguments,
        data_collator=as_is,
        train_dataset=splits.train,
        eval_dataset=splits.dev,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
        callbacks=[ShowProgress(f"{cell.task} {cell.attention} seed {cell.seed}"), Record(recorder), Curves(out)],
        scheduler=partial(one_cycle, warmup=arguments.warmup_steps) if cell.legacy.one_cycle else None,
    )
    train(trainer)
    metrics = trainer.predict(splits.test, metric_key_prefix="test").metrics
    finish(trainer)
    if arguments.should_save:
        steps = trainer.args.max_steps
        recorder.record(
            RESULTS["lra"],
            metrics["test_accuracy"],
            step=steps,
            examples_seen=examples_seen(steps, cell.recipe.batch_size, len(splits.train)),
            train_examples=len(splits.train),
            test_examples=len(splits.test),
            dev_accuracy=trainer.state.best_metric,
            best_step=trainer.state.best_global_step,
            majority=majority(splits.test),
            parameters=trainer.model.num_parameters(),
        )
    trainer.accelerator.wait_for_everyone()
    return result_in(out)


def majority(examples: Examples) -> float:
    """The accuracy of always saying the most frequent class."""
    return float(np.bincount(examples.classes).max() / len(examples))


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of right classes."""
    return {"accuracy": float(np.mean(prediction.predictions == prediction.label_ids))}


def one_cycle(optimizer: Optimizer, steps: int, warmup: float) -> LRScheduler:
    """The released schedule. Like any one-cycle schedule of PyTorch it moves β₁ against the learning rate."""
    peak = optimizer.param_groups[0]["lr"]
    rising = max(warmup, 2) / steps  # PyTorch divides by the steps of a phase less one
    return OneCycleLR(optimizer, max_lr=peak, total_steps=steps, pct_start=rising, anneal_strategy="linear")
