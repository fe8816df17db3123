"""Fine-tuning: the recipes, tokenized texts, and one run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed

from nystromformer.data.glue import TASKS, Texts, TextSplits
from nystromformer.data.lra import as_is
from nystromformer.files import write_text
from nystromformer.records import RESULTS, Recorder, result_in
from nystromformer.training.arguments import processes, training_arguments
from nystromformer.training.callbacks import Curves, Record, ShowProgress, StopEarly, has_stalled
from nystromformer.training.checkpoints import last_checkpoint, trainer_state
from nystromformer.training.metrics import metric_function, scores
from nystromformer.training.trainer import ExactTrainer, LongestFirst, examples_seen, finish, prepare_folder, train

SEARCH_BATCH_SIZES = (8, 16, 32)

SEARCH_LEARNING_RATES = (2e-5, 3e-5, 4e-5, 5e-5)
"""What the paper searches for MRPC: the best on the development part is taken."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The defaults are the paper's: batch 32, AdamW with 3e-5, 4 epochs. It says nothing of warm-up and weight decay:
    these are BERT's."""

    epochs: float = 4
    steps: int | None = None
    """Instead of epochs."""
    batch_size: int = 32
    learning_rate: float = 3e-5
    max_length: int = 512
    """Longer inputs are cut here."""
    warmup: float = 0.1
    """The share of steps in which the learning rate rises."""
    weight_decay: float = 0.01
    evals_per_epoch: int = 1
    patience: int | None = None
    """Stop after so many evaluations in a row without a better one; None never does."""
    train_examples: int | None = None
    dev_examples: int | None = None
    test_examples: int | None = None
    """At most so many are used; None is all. Test parts without labels are always predicted whole."""

    def steps_of(self, examples: int) -> int:
        """
        >>> Recipe().steps_of(3668)
        460
        """
        return self.steps or max(1, round(self.epochs * self._per_epoch(examples)))

    def arguments(self, examples: int, metric: str) -> dict[str, object]:
        """Fields of `TrainingArguments` for a training part of so many examples."""
        steps = self.steps_of(examples)
        every = min(steps, max(1, self._per_epoch(examples) // self.evals_per_epoch))
        return {
            "max_steps": steps,
            "learning_rate": self.learning_rate,
            "warmup_steps": round(self.warmup * steps),
            "lr_scheduler_type": "linear",
            "optim": "adamw_torch",
            "weight_decay": self.weight_decay,
            "eval_strategy": "steps",
            "eval_steps": every,
            "save_strategy": "steps",
            "save_steps": every,
            "logging_steps": every,
            "metric_for_best_model": metric,
            "greater_is_better": True,
            "load_best_model_at_end": True,
        }

    def _per_epoch(self, examples: int) -> int:
        return -(-examples // self.batch_size)


RECIPES: dict[str, Recipe] = {
    "paper": Recipe(),
    "mini": Recipe(
        epochs=2,
        learning_rate=5e-5,
        max_length=128,
        train_examples=2_000,
        dev_examples=500,
        test_examples=1_000,
        evals_per_epoch=2,
    ),
    "smoke": Recipe(
        steps=4,
        batch_size=4,
        max_length=32,
        train_examples=16,
        dev_examples=8,
        test_examples=8,
        evals_per_epoch=2,
    ),
}


CHUNK = 1_000
"""Texts that are tokenized at once."""


@dataclass(frozen=True)
class TokenizedTexts:
    """A data set for `ExactTrainer`. Its batches are ready, and always with the mask that the encoder must see."""

    ids: list[np.ndarray]
    types: list[np.ndarray] | None
    labels: np.ndarray | None
    padding: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(ids) for ids in self.ids])

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return self.batch([position])

    def __getitems__(self, positions: Sequence[int]) -> dict[str, Tensor]:
        return self.batch(positions)

    def batch(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask` and, where the model has them, `token_type_ids` (b, n); `labels` (b,)."""
        chosen = [self.ids[position] for position in positions]
        found = {
            "input_ids": _padded(chosen, self.padding),
            "attention_mask": _padded([np.ones(len(ids), dtype=np.int64) for ids in chosen], 0),
        }
        if self.types is not None:
            found["token_type_ids"] = _padded([self.types[position] for position in positions], 0)
        if self.labels is not None:
            found["labels"] = torch.from_numpy(self.labels[np.asarray(positions)])
        return found


def tokenize(
    texts: Texts,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    with_types: bool,
    progress: Callable[[int, int], None] = lambda done, wanted: None,
) -> TokenizedTexts:
    """All texts of a part, each cut at `max_length` tokens; of a pair, the longer text is cut first."""
    ids: list[np.ndarray] = []
    types: list[np.ndarray] = []
    for start in range(0, len(texts), CHUNK):
        part = slice(start, start + CHUNK)
        encoded = tokenizer(
            texts.first[part],
            None if texts.second is None else texts.second[part],
            truncation=True,
            max_length=max_length,
            padding=False,
            return_token_type_ids=with_types,
            return_attention_mask=False,
            verbose=False,
        )
        ids += [np.array(row, dtype=np.int32) for row in encoded["input_ids"]]
        if with_types:
            types += [np.array(row, dtype=np.uint8) for row in encoded["token_type_ids"]]
        progress(len(ids), len(texts))
    padding = 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return TokenizedTexts(ids, types if with_types else None, texts.labels, padding)


def _padded(rows: list[np.ndarray], padding: int) -> Tensor:
    filled = np.full((len(rows), max(len(row) for row in rows)), padding, dtype=np.int64)
    for row, target in zip(rows, filled, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(filled)


SUBMISSIONS = {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"}
"""Names of GLUE's submission files that are not the task's own."""

HIGHEST_SCORE = 5.0
"""Of STS-B."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Everything that decides what comes out, but for the data."""

    task: str
    model: str
    attention: str
    conv_kernel_size: int | None
    """Of the skip convolution that the model has with this attention."""
    seed: int
    preset: str
    recipe: Recipe
    search: bool
    """One of the runs from which the best on the development part is taken."""
    settings: dict[str, object]
    """Fields of `TrainingArguments` that the user has set."""
    dtype: str

    @property
    def variant(self) -> str:
        """What tells it from others in a sweep, also as a folder: the attention, and its convolution if it has one."""
        return self.attention + (f"-conv-{self.conv_kernel_size}" if self.conv_kernel_size else "")

    def config(self) -> dict[str, object]:
        """As it is noted in the folder and in each record."""
        return {
            "task": self.task,
            "model": self.model,
            "attention": self.attention,
            "conv_kernel_size": self.conv_kernel_size,
            "preset": self.preset,
            **{name: value for name, value in vars(self.recipe).items() if value is not None},
            "search": self.search,
            "settings": self.settings,
            "dtype": self.dtype,
            "processes": processes(),
        }


@dataclass(frozen=True, kw_only=True)
class FinetuningData:
    """The parts of a data set as the model reads them, beside the texts they come from."""

    splits: TextSplits
    train: TokenizedTexts
    dev: dict[str, TokenizedTexts]
    test: dict[str, TokenizedTexts]

    @property
    def is_regression(self) -> bool:
        return self.splits.labels is None


def metrics_of(task: str, is_regression: bool) -> tuple[str, ...]:
    """The first decides. A task of the user's own has accuracy, or correlations where its labels are numbers."""
    if task in TASKS:
        return TASKS[task].metrics
    return ("pearson", "spearman") if is_regression else ("accuracy",)


def arguments_of(cell: Cell, out: Path, device: str, train_examples: int, metric: str) -> TrainingArguments:
    return training_arguments(
        out,
        batch_size=cell.recipe.batch_size,
        seed=cell.seed,
        device=device,
        dtype=cell.dtype,
        defaults=cell.recipe.arguments(train_examples, metric),
        settings=cell.settings,
    )


def run_cell(
    cell: Cell,
    data: FinetuningData,
    load_model: Callable[[], PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    device: str,
    *,
    resume: bool,
    predict: bool,
) -> dict[str, object]:
    """Train, take the model that was best on the first development part, and score it. Returns the record.

    With `predict`, the predictions for test parts without labels are written as GLUE's server reads them.
    """
    metrics = metrics_of(cell.task, data.is_regression)
    arguments = arguments_of(cell, out, device, len(data.train), metrics[0])
    config = {**cell.config(), "data": data.splits.fingerprint()}
    with arguments.main_process_first():  # the others find the folder as it shall be
        if arguments.should_save:
            prepare_folder(out, config, resume)
    if (done := result_in(out)) is not None:
        return done
    recorder = Recorder(out, job="finetune", config=config, seed=cell.seed)
    set_seed(cell.seed)
    callbacks = [ShowProgress(f"{cell.task} {cell.variant} seed {cell.seed}"), Record(recorder), Curves(out)]
    patience = cell.recipe.patience
    trainer = ExactTrainer(
        model=load_model(),
        args=arguments,
        data_collator=as_is,
        train_dataset=data.train,
        eval_dataset=next(iter(data.dev.values())),
        processing_class=tokenizer,
        compute_metrics=metric_function(metrics),
        preprocess_logits_for_metrics=numbers_of if data.is_regression else classes_of,
        callbacks=callbacks + ([StopEarly(metrics[0], patience)] if patience else []),
    )
    if patience:
        end_where_stopped(trainer, metrics[0], patience)
    train(trainer)
    found = score_parts(trainer, data, metrics)
    if predict:
        write_predictions(trainer, data, cell.task, out)
    finish(trainer)
    if arguments.should_save:
        record_result(recorder, trainer, cell, data, metrics[0], found)
    trainer.accelerator.wait_for_everyone()
    return result_in(out)


def end_where_stopped(trainer: ExactTrainer, metric: str, patience: int) -> None:
    """A run that had stopped early and was killed before it was scored takes no further step."""
    checkpoint = last_checkpoint(Path(trainer.args.output_dir))
    if checkpoint is not None:
        state = trainer_state(checkpoint)
        if has_stalled(state["log_history"], metric, patience):
            trainer.args.max_steps = state["global_step"]


def score_parts(trainer: ExactTrainer, data: FinetuningData, metrics: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Scores of all parts with labels, by part and metric."""
    parts = {name: part for name, part in (data.dev | data.test).items() if part.labels is not None}
    return {name: scores(metrics, part.labels, predictions(trainer, part)) for name, part in parts.items()}


def predictions(trainer: ExactTrainer, part: TokenizedTexts) -> np.ndarray:
    """A class or a number for each example, in the order of the part."""
    found = trainer.predict(part, metric_key_prefix="test").predictions
    in_order = np.empty_like(found)
    in_order[LongestFirst(part.lengths).order] = found  # which is how the trainer goes through them
    return in_order


def write_predictions(trainer: ExactTrainer, data: FinetuningData, task: str, out: Path) -> None:
    """`predictions/TASK.tsv` for test parts without labels: `index` and `prediction`, with names of classes."""
    for name, part in data.test.items():
        if part.labels is not None:
            continue
        found = predictions(trainer, part)
        if data.is_regression:
            written = [f"{min(max(value, 0.0), HIGHEST_SCORE) if task == 'stsb' else value:.3f}" for value in found]
        else:
            written = [data.splits.labels[value] for value in found]
        rows = zip(data.splits.test[name].index, written, strict=True)
        title = SUBMISSIONS.get(name, TASKS[task].title if task in TASKS else name)
        if trainer.args.should_save:
            lines = ["index\tprediction", *("\t".join(row) for row in rows)]
            write_text(out / "predictions" / f"{title}.tsv", "\n".join(lines) + "\n")


def record_result(
    recorder: Recorder,
    trainer: ExactTrainer,
    cell: Cell,
    data: FinetuningData,
    metric: str,
    found: dict[str, dict[str, float]],
) -> None:
    """The paper's metric on the test part, where that has labels; else on the first development part."""
    dev = next(iter(data.dev))
    part = next((name for name in data.test if name in found), dev)
    steps = trainer.state.global_step
    recorder.record(
        RESULTS["finetune"],
        found[part][metric],
        name=metric,
        part=part,
        dev_score=found[dev][metric],
        scores=found,
        step=steps,
        best_step=trainer.state.best_global_step,
        examples_seen=examples_seen(steps, cell.recipe.batch_size, len(data.train)),
        train_examples=len(data.train),
        scored_examples={name: len((data.dev | data.test)[name]) for name in found},
        left_out=data.splits.train.left_out,
        mean_length=round(float(data.train.lengths.mean()), 1),
        parameters=trainer.model.num_parameters(),
    )


def classes_of(logits: Tensor, labels: Tensor) -> Tensor:
    return _first(logits).argmax(dim=-1)


def numbers_of(logits: Tensor, labels: Tensor) -> Tensor:
    return _first(logits).float().squeeze(-1)


def _first(logits: Tensor | tuple) -> Tensor:
    """Some models hand on more than logits."""
    return logits[0] if isinstance(logits, tuple) else logits
