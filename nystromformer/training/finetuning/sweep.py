"""Fine-tuning: one run by a recipe, and the sweep that `finetune` asks for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from nystromformer.checks import check_choice, parse_names
from nystromformer.data.glue import CUSTOM, TASKS, Columns, read_custom, read_task, task_name
from nystromformer.data.lra import as_is
from nystromformer.errors import user_input
from nystromformer.files import write_text
from nystromformer.integrations import register
from nystromformer.report.table import Table
from nystromformer.report.tables import SCORES, finetune_tables
from nystromformer.training.finetuning.data import FinetuningData, TokenizedTexts, limited
from nystromformer.training.finetuning.models import Source, check_attention, load_classifier
from nystromformer.training.run import last_checkpoint, trainer_state
from nystromformer.training.shared.callbacks import metric_function, scores
from nystromformer.training.shared.recipes import (
    FINETUNING_RECIPES,
    SEARCH_BATCH_SIZES,
    SEARCH_LEARNING_RATES,
    FinetuningRecipe,
)
from nystromformer.training.sweep import Cell, Sweep
from nystromformer.training.trainer import ExactTrainer, LongestFirst

PAPER_TASKS = tuple(TASKS)[:6]
"""What `all` stands for."""

SUBMISSIONS = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"}
"""Names of GLUE's submission files that are not the task's own."""

HIGHEST_SCORE = 5.0
"""Of STS-B."""


@dataclass(frozen=True, kw_only=True)
class FinetuningCell(Cell[FinetuningData]):
    """One task, attention and seed; one of many if the best is searched for."""

    job = "finetune"
    recipe: FinetuningRecipe
    model: str
    new_head: bool
    conv_kernel_size: int | None
    """Of the skip convolution that the model has with this attention."""
    search: bool
    """One of the runs from which the best on the development part is taken."""

    @property
    def variant(self) -> str:
        """The attention, and its convolution if it has one."""
        return self.attention + (f"-conv-{self.conv_kernel_size}" if self.conv_kernel_size else "")

    @property
    def folder(self) -> Path:
        tried = f"batch-{self.recipe.batch_size}-rate-{self.recipe.learning_rate:g}"
        return super().folder / tried if self.search else super().folder

    def defaults(self, data: FinetuningData | None) -> dict[str, Any]:
        if data is None:
            return self.recipe.arguments(1, metrics_of(self.task, False)[0])
        metric, tokens = metrics_of(self.task, data.is_regression)[0], int(data.train.tokens.sum())
        return self.recipe.arguments(len(data.train), metric, tokens)

    def trainer(
        self, data: FinetuningData, arguments: TrainingArguments, callbacks: list[TrainerCallback]
    ) -> ExactTrainer:
        patience = self.recipe.patience
        with user_input():
            model = load_classifier(
                Source(name=self.model, new_head=self.new_head),
                attention=self.attention,
                conv_kernel_size=self.conv_kernel_size or 0,
                max_length=self.recipe.max_length,
                labels=data.splits.labels,
            )
        trainer = ExactTrainer(
            model=model,
            args=arguments,
            data_collator=as_is,
            train_dataset=data.train,
            eval_dataset=next(iter(data.dev.values())),
            processing_class=data.tokenizer,
            compute_metrics=metric_function(metrics_of(self.task, data.is_regression)),
            preprocess_logits_for_metrics=numbers_of if data.is_regression else classes_of,
            callbacks=callbacks + ([EarlyStoppingCallback(patience)] if patience else []),
            packed=self.recipe.packed,
        )
        if patience:
            end_where_stopped(trainer, patience)
        return trainer

    def score(self, trainer: ExactTrainer, data: FinetuningData) -> tuple[float, dict[str, Any]]:
        """The paper's metric on the test part, where that has labels; otherwise on the first development part.

        Test parts without labels are predicted, as GLUE's server reads them.
        """
        metrics = metrics_of(self.task, data.is_regression)
        found = score_parts(trainer, data, metrics)
        write_predictions(trainer, data, self.task)
        dev = next(iter(data.dev))
        part = next((name for name in data.test if name in found), dev)
        return found[part][metrics[0]], {
            "name": metrics[0],
            "part": part,
            "dev_score": found[dev][metrics[0]],
            "scores": found,
            "scored_examples": {name: len((data.dev | data.test)[name]) for name in found},
            "left_out": data.splits.train.left_out,
            "mean_length": round(float(data.train.lengths.mean()), 1),
        }


@dataclass(frozen=True, kw_only=True)
class FinetuningSweep(Sweep[FinetuningCell, FinetuningData]):
    """What `finetune` was asked for."""

    model: str
    tokenizer: str
    conv_kernel_size: int | None
    """Of all attentions; None leaves each model with what it has, 0 without."""
    text_column: str
    pair_column: str
    label_column: str
    search: bool
    predict: bool | None
    """Whether to predict test parts without labels; None does in full runs, as others are not worth submitting."""
    new_head: bool

    def __post_init__(self) -> None:
        if self.search and self.changes.keys() & {"batch_size", "learning_rate"}:
            raise ValueError("--search tries batch sizes and learning rates: leave out --batch-size, --learning-rate.")
        if (self.pair_column or self.label_column) and not self.text_column:
            raise ValueError("--text-column is missing: give the column of the (first) text.")
        if (CUSTOM in self.tasks) != bool(self.text_column) or (self.text_column and len(self.tasks) > 1):
            raise ValueError(
                f"TASK {self.task}: --text-column, --pair-column and --label-column belong to the task {CUSTOM!r} "
                f"alone, which needs --text-column; the columns of other tasks are known."
            )
        if self.text_column and not self.data:
            raise ValueError(f"TASK {CUSTOM}: needs --data, a file or a folder with train.csv or the like.")
        if "packed" in self.changes and not self.source.is_own:
            raise ValueError(
                f"--packed with {self.model}: its own head pools a whole row of tokens, not each sequence in it; "
                f"convert it with `nystromformer convert {self.model} DST`, and give DST."
            )
        for attention in self.attentions:
            check_attention(self.source, attention, self.conv_kernel_size)
        if "max_length" in self.changes:
            self.source.check_length(self.changes["max_length"])
        super().__post_init__()

    @cached_property
    def source(self) -> Source:
        register()
        return Source(name=self.model, new_head=self.new_head)

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        names = PAPER_TASKS if self.task == "all" else tuple(map(task_name, parse_names("TASK", self.task)))
        for name in names:
            check_choice("TASK", name, (*TASKS, CUSTOM, "all"))
        return names

    @cached_property
    def attentions(self) -> tuple[str, ...]:
        return self.names("--attention", self.attention) or (self.source.attention,)

    @cached_property
    def recipes(self) -> list[FinetuningRecipe]:
        """One, or all of a search."""
        recipe = FINETUNING_RECIPES[self.preset].changed(**self.changes)
        if "epochs" in self.changes and "steps" not in self.changes:
            recipe = replace(recipe, steps=None)
        room = self.source.max_length
        if "max_length" not in self.changes and room is not None:  # only a length that was asked for lengthens a model
            recipe = replace(recipe, max_length=min(recipe.max_length, room))
        if not self.search:
            return [recipe]
        return [
            replace(recipe, batch_size=batch_size, learning_rate=rate)
            for batch_size in SEARCH_BATCH_SIZES
            for rate in SEARCH_LEARNING_RATES
        ]

    @cached_property
    def cells(self) -> list[FinetuningCell]:
        return [
            FinetuningCell(
                task=task,
                attention=attention,
                seed=seed,
                preset=self.preset,
                recipe=recipe,
                model=self.model,
                new_head=self.new_head,
                conv_kernel_size=self.source.conv_kernel_size(attention, self.conv_kernel_size),
                search=self.search,
                settings=self.parsed_settings,
                dtype=self.dtype,
            )
            for task in self.tasks
            for attention in self.attentions
            for seed in self.all_seeds
            for recipe in self.recipes
        ]

    def read(self, cell: FinetuningCell, arguments: TrainingArguments, say: Callable[[str], None]) -> FinetuningData:
        tokenizer = self.source.tokenizer(self.tokenizer)
        splits = read_custom(self.data, self.columns) if cell.task == CUSTOM else read_task(cell.task, self.data)
        self.source.check_head(splits.labels)
        if splits.train.left_out:
            say(f"{cell.task}: {splits.train.left_out:,} damaged lines of the training file were left out, as is usual")
        predict = self.preset == "paper" if self.predict is None else self.predict
        types = getattr(self.source.config(), "type_vocab_size", 0) > 1
        return FinetuningData.of(
            cell.task,
            limited(splits, cell.recipe, with_unlabeled=predict),
            tokenizer,
            cell.recipe.max_length,
            with_types=types and "token_type_ids" in tokenizer.model_input_names,
        )

    @property
    def columns(self) -> Columns:
        return Columns(first=self.text_column, second=self.pair_column or None, label=self.label_column or "label")

    def result(self, record: dict[str, Any]) -> str:
        examples = record["scored_examples"][record["part"]]
        return f"{SCORES[record['name']]} {100 * record['value']:.2f} on {examples:,} examples ({record['part']})"

    def tables(self, records: Iterable[dict[str, Any]]) -> list[Table]:
        return finetune_tables(records)


def metrics_of(task: str, is_regression: bool) -> tuple[str, ...]:
    """The first decides. A task of the user's own has accuracy, or correlations where its labels are numbers."""
    if task in TASKS:
        return TASKS[task].metrics
    return ("pearson", "spearman") if is_regression else ("accuracy",)


def end_where_stopped(trainer: ExactTrainer, patience: int) -> None:
    """A run that had stopped early and was killed before it was scored takes no further step."""
    checkpoint = last_checkpoint(Path(trainer.args.output_dir))
    if checkpoint is not None:
        state = trainer_state(checkpoint)
        noted = state["stateful_callbacks"][EarlyStoppingCallback.__name__]["attributes"]
        if noted["early_stopping_patience_counter"] >= patience:
            trainer.args.max_steps = state["global_step"]


def score_parts(trainer: ExactTrainer, data: FinetuningData, metrics: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Scores of all parts with labels, by part and metric."""
    return {
        name: scores(metrics, part.labels, predictions(trainer, part))
        for name, part in (data.dev | data.test).items()
        if part.labels is not None
    }


def predictions(trainer: ExactTrainer, part: TokenizedTexts) -> np.ndarray:
    """A class or a number for each example, in the order of the part."""
    found = trainer.predict(part, metric_key_prefix="test").predictions
    in_order = np.empty_like(found)
    in_order[LongestFirst(part.lengths).order] = found  # which is how the trainer goes through them
    return in_order


def write_predictions(trainer: ExactTrainer, data: FinetuningData, task: str) -> None:
    """`predictions/TASK.tsv` for test parts without labels: `index` and `prediction`, with names of classes."""
    for name, part in data.test.items():
        if part.labels is not None:
            continue
        found = predictions(trainer, part)
        if data.is_regression:
            written = [f"{min(max(value, 0.0), HIGHEST_SCORE) if task == 'stsb' else value:.3f}" for value in found]
        else:
            names = data.splits.labels or ()
            written = [names[value] for value in found]
        rows = zip(data.splits.test[name].index, written, strict=True)
        title = SUBMISSIONS.get(name, TASKS[task].title if task in TASKS else name)
        if trainer.args.should_save:
            lines = ["index\tprediction", *("\t".join(row) for row in rows)]
            write_text(Path(trainer.args.output_dir) / "predictions" / f"{title}.tsv", "\n".join(lines) + "\n")


def classes_of(logits: Tensor, labels: Tensor) -> Tensor:
    return _first(logits).argmax(dim=-1)


def numbers_of(logits: Tensor, labels: Tensor) -> Tensor:
    return _first(logits).float().squeeze(-1)


def _first(logits: Tensor | tuple) -> Tensor:
    """Some models hand on more than logits."""
    return logits[0] if isinstance(logits, tuple) else logits
