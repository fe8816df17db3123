"""One cell of the Long Range Arena table: a task, an attention and a seed, trained and tested in its own folder."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from transformers import TrainingArguments, set_seed
from transformers.trainer_utils import EvalPrediction

from nystromformer.data.lra import TASKS, Examples, Splits, as_is
from nystromformer.models.lra import NystromformerForLongRangeArena, lra_config
from nystromformer.records import RESULTS, Recorder, result_in
from nystromformer.training.arguments import processes, training_arguments
from nystromformer.training.lra_recipes import TEXT_LENGTH, Legacy, Recipe
from nystromformer.training.order import examples_seen
from nystromformer.training.progress import ShowProgress
from nystromformer.training.recording import Curves, Record
from nystromformer.training.run import finish, prepare_folder, train
from nystromformer.training.trainer import ExactTrainer


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
