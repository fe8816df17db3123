"""Recipes: the numbers by which each job trains, for the presets `paper`, `mini` (minutes) and `smoke` (seconds).

A recipe is one kind of thing for every job: fields, `changed` by options of the same names, and `arguments`, the fields
of Transformers' `TrainingArguments` that it stands for.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from nystromformer.checks import check_choice
from nystromformer.data.lra import Task
from nystromformer.data.lra.listops import ListOpsOptions
from nystromformer.data.lra.pathfinder import PathfinderSetOptions
from nystromformer.training import PRESETS, SIZES
from nystromformer.training.shared.packing import steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained. Each job adds what is its own."""

    steps: int | None
    batch_size: int
    learning_rate: float
    warmup: float
    """Steps in which the learning rate rises; below 1 it is a share of all steps."""
    max_length: int
    """Longer inputs are cut here."""

    def changed(self, **changes: Any) -> Self:
        """With some fields changed; None leaves a field as it is.

        With fewer steps, warm-up and intervals that are counted in steps shrink too.
        """
        given = {name: value for name, value in changes.items() if value is not None}
        if self.steps is not None and "steps" in given:
            intervals = [field.name for field in fields(self) if field.name.endswith("_every")]
            shrunk = {name: min(getattr(self, name), given["steps"]) for name in intervals}
            if self.warmup >= 1:
                shrunk["warmup"] = round(self.warmup * min(1.0, given["steps"] / self.steps))
            given = shrunk | given
        return replace(self, **given)

    def noted(self) -> dict[str, Any]:
        """As it stands in `config.json` and in each record."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def schedule(self, steps: int, every: int) -> dict[str, Any]:
        """The fields of `TrainingArguments` that all jobs share: AdamW, and a rate that rises and falls linearly.

        Evaluations, checkpoints and log entries come `every` so many steps.
        """
        return {
            "max_steps": steps,
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup if self.warmup >= 1 else round(self.warmup * steps),
            "lr_scheduler_type": "linear",
            "optim": "adamw_torch",
            "eval_strategy": "steps",
            "eval_steps": every,
            "save_strategy": "steps",
            "save_steps": every,
            "logging_steps": every,
        }


@dataclass(frozen=True, kw_only=True)
class ScoredRecipe(Recipe):
    """Of a job that keeps the model that was best on the development part, and scores it on the test part."""

    train_examples: int | None = None
    dev_examples: int | None = None
    test_examples: int | None = None
    """At most so many are used; None is all. Test parts without labels are always predicted whole."""
    packed: int | None = None
    """Train on about so many tokens per step, packed without padding, in place of `batch_size` examples."""

    def schedule(self, steps: int, every: int) -> dict[str, Any]:
        whole_batches = {} if self.packed is None else {"per_device_train_batch_size": 1}
        return super().schedule(steps, every) | whole_batches

    def best_by(self, metric: str) -> dict[str, Any]:
        """The fields of `TrainingArguments` that choose the model."""
        return {"metric_for_best_model": metric, "greater_is_better": True, "load_best_model_at_end": True}


# Long Range Arena

LRA_OPTIMIZER = {"adam_epsilon": 1e-6, "weight_decay": 0.0, "max_grad_norm": 0.0}


@dataclass(frozen=True, kw_only=True)
class LraRecipe(ScoredRecipe):
    """How a task is trained and tested. The defaults are what the paper's recipes share."""

    steps: int
    eval_every: int
    learning_rate: float = 1e-4
    attention_dropout: float = 0.1
    """Of the attention matrix, in the attention that has one: standard."""
    positions: str | None = None
    """"learned", as in the paper and by default, or "rotary"."""
    conv_kernel_size: int | None = None
    """Of the skip convolution; the paper's 35 by default."""
    dropout: float | None = None
    """Of embeddings and sublayers; the paper's 0.1 by default."""
    embedding_start: str | None = None
    """"random", as in the paper and by default, or "picture": near levels of gray, rows and columns begin alike."""
    normalize_pooled: bool | None = None
    """Normalize the means over tokens over the batch before they are classified; not by default."""
    self_pretrain: int | None = None
    """Steps of self-pretraining before; none by default."""
    data: ListOpsOptions | PathfinderSetOptions | None = None
    """How data is made where none is given."""

    @property
    def room(self) -> int:
        """Room in the position table: the next power of two."""
        return 1 << (self.max_length - 1).bit_length()

    def noted(self) -> dict[str, Any]:
        return {name: value for name, value in super().noted().items() if name != "data"}

    def arguments(self) -> dict[str, Any]:
        """Fields of `TrainingArguments`."""
        return self.schedule(self.steps, self.eval_every) | LRA_OPTIMIZER | self.best_by("accuracy")

    def model_fields(self, task: Task) -> dict[str, Any]:
        """Fields of the task's model, the same before and after self-pretraining."""
        chosen = {
            "positions": self.positions,
            "conv_kernel_size": self.conv_kernel_size,
            "hidden_dropout_prob": self.dropout,
            "embedding_start": self.embedding_start,
            "normalize_pooled": self.normalize_pooled,
        }
        return {
            "vocab_size": task.vocabulary,
            "num_labels": task.classes,
            "problem_type": "single_label_classification",
            "max_position_embeddings": self.room,
            "attention_probs_dropout_prob": self.attention_dropout,
            "pair": task.pair,
            **{name: value for name, value in chosen.items() if value is not None},
        }


PICTURE = {"embedding_start": "picture", "normalize_pooled": True, "dropout": 0.0}
"""Most of Pathfinder's pixels are background, so that means over tokens hardly differ between pictures; and tables that
begin at random have to learn first which pixels are neighbors."""

# Attention dropout is off in the small recipes: with it exact attention writes its matrix down where there is neither a
# GPU nor machine code of our own.
_MINI = LraRecipe(
    steps=600, batch_size=16, warmup=60, eval_every=200, max_length=1_000, learning_rate=1e-3, attention_dropout=0.0
).changed(dev_examples=500, test_examples=2_000)
# As many steps as an hour of two cores takes with `nystrom-64`, at 100,000 tokens per second.
_HOUR = LraRecipe(
    steps=8_000, batch_size=32, warmup=800, eval_every=500, max_length=1_024, learning_rate=1e-3, attention_dropout=0.0
).changed(dev_examples=2_000)
_SMOKE = _MINI.changed(steps=4, batch_size=4, warmup=1, eval_every=2, max_length=128).changed(
    train_examples=16, dev_examples=6, test_examples=10
)
LRA_RECIPES: dict[str, dict[str, LraRecipe]] = {
    "paper": {
        "listops": LraRecipe(
            steps=5_000, batch_size=32, warmup=1_000, eval_every=50, max_length=2_000, data=ListOpsOptions()
        ),
        "text": LraRecipe(steps=20_000, batch_size=32, warmup=8_000, eval_every=500, max_length=4_000),
        "retrieval": LraRecipe(steps=30_000, batch_size=32, warmup=800, eval_every=300, max_length=4_000),
        "image": LraRecipe(steps=35_000, batch_size=256, warmup=175, eval_every=175, max_length=1_024),
        "pathfinder": LraRecipe(
            steps=62_400, batch_size=256, warmup=312, eval_every=312, max_length=1_024, data=PathfinderSetOptions()
        ),
    },
    "hour": {
        "listops": _HOUR.changed(
            steps=5_000, warmup=1_000, eval_every=250, max_length=2_000, learning_rate=1e-4, data=ListOpsOptions()
        ),
        "text": _HOUR.changed(max_length=4_000, learning_rate=5e-4),
        "retrieval": _HOUR.changed(steps=1_500, eval_every=250, max_length=4_000),
        "image": _HOUR,
        # Its contours can't be followed from pixel to pixel with 35 taps: the pixel below is 32 away.
        "pathfinder": _HOUR.changed(
            steps=6_000,
            learning_rate=5e-4,
            conv_kernel_size=65,
            self_pretrain=1_000,
            data=PathfinderSetOptions(count=100_000),
            **PICTURE,
        ),
    },
    "mini": {
        "listops": _MINI.changed(
            eval_every=100,
            max_length=256,
            learning_rate=2e-3,
            data=ListOpsOptions(min_tokens=64, max_tokens=256, train=20_000, dev=2_000, test=2_000),
        ),
        "text": _MINI,
        "retrieval": _MINI.changed(batch_size=8),
        "image": _MINI.changed(max_length=1_024),
        "pathfinder": _MINI.changed(
            steps=1_000,
            batch_size=32,
            warmup=100,
            max_length=1_024,
            learning_rate=5e-4,
            conv_kernel_size=65,
            self_pretrain=500,
            dev_examples=2_000,
            data=PathfinderSetOptions(count=60_000, contour_length=6),
            **PICTURE,
        ),
    },
    "smoke": {
        "listops": _SMOKE.changed(data=ListOpsOptions(min_tokens=16, max_tokens=64, train=16, dev=6, test=10)),
        "text": _SMOKE,
        "retrieval": _SMOKE,
        "image": _SMOKE,
        "pathfinder": _SMOKE.changed(data=PathfinderSetOptions(count=40)),
    },
}
"""By preset and task."""

# Fine-tuning

SEARCH_BATCH_SIZES = (8, 16, 32)

SEARCH_LEARNING_RATES = (2e-5, 3e-5, 4e-5, 5e-5)
"""What the paper searches for MRPC: the best on the development part is taken."""


@dataclass(frozen=True, kw_only=True)
class FinetuningRecipe(ScoredRecipe):
    """The defaults are the paper's: batch 32, AdamW with 3e-5, 4 epochs. It says nothing of warm-up and weight decay:
    these are BERT's."""

    batch_size: int = 32
    epochs: float = 4
    learning_rate: float = 3e-5
    warmup: float = 0.1
    weight_decay: float = 0.01
    steps: int | None = None
    """In place of epochs."""
    patience: int | None = None
    """Stop after so many evaluations in a row without a better one; None never does."""
    evals_per_epoch: int = 1
    max_length: int = 512

    def steps_of(self, examples: int) -> int:
        """
        >>> FinetuningRecipe().steps_of(3668)
        460
        """
        return self._steps(self._per_epoch(examples, 0))

    def arguments(self, examples: int, metric: str, tokens: int = 0) -> dict[str, Any]:
        """Fields of `TrainingArguments` for a training part of so many examples and `tokens`."""
        per_epoch = self._per_epoch(examples, tokens)
        steps = self._steps(per_epoch)
        every = min(steps, max(1, per_epoch // self.evals_per_epoch))
        return {
            **self.schedule(steps, every),
            **self.best_by(metric),
            "weight_decay": self.weight_decay,
            "restore_callback_states_from_checkpoint": True,  # how long there was no better evaluation
        }

    def _steps(self, per_epoch: int) -> int:
        return self.steps or max(1, round(self.epochs * per_epoch))

    def _per_epoch(self, examples: int, tokens: int) -> int:
        return -(-examples // self.batch_size) if self.packed is None else steps_per_epoch(tokens, self.packed)


_PAPER = FinetuningRecipe()
FINETUNING_RECIPES: dict[str, FinetuningRecipe] = {
    "paper": _PAPER,
    "mini": _PAPER.changed(epochs=2, learning_rate=5e-5, max_length=128, evals_per_epoch=2).changed(
        train_examples=2_000, dev_examples=500, test_examples=1_000
    ),
    "smoke": _PAPER.changed(steps=4, batch_size=4, max_length=32, evals_per_epoch=2).changed(
        train_examples=16, dev_examples=8, test_examples=8
    ),
}
"""By preset."""

# Pretraining


@dataclass(frozen=True, kw_only=True)
class PretrainingRecipe(Recipe):
    """How a model is pretrained. The defaults are the paper's.

    >>> recipe = pretraining_recipe("paper", "small").changed(steps=1_000, eval_every=200)
    >>> recipe.warmup, recipe.eval_every, recipe.save_every
    (100, 200, 1000)
    """

    size: str
    steps: int
    batch_size: int = 256
    micro_batch: int = 16
    """Examples that go through the model at a time; a step accumulates the gradients of several."""
    warmup: int = 10_000
    learning_rate: float = 1e-4
    max_length: int = 512
    vocab_size: int = 30_000
    """Of a tokenizer that is trained."""
    dropout: float = 0.1
    attention_dropout: float = 0.1
    """Of the attention matrix, in the attention that has one: standard."""
    eval_every: int = 2_000
    eval_examples: int | None = 4_096
    """At most so many validation examples are used; None is all."""
    save_every: int = 1_000
    log_every: int = 100

    def arguments(self, processes: int = 1) -> dict[str, Any]:
        """Fields of `TrainingArguments`."""
        optimizer = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-6}
        return {
            **self.schedule(self.steps, self.eval_every),
            **optimizer,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "save_steps": self.save_every,
            "logging_steps": self.log_every,
            "gradient_accumulation_steps": self.accumulation(processes),
            "dataloader_num_workers": 2,
            "include_num_input_tokens_seen": "non_padding",
        }

    def accumulation(self, processes: int) -> int:
        """Micro-batches of a step on each process: the fewest that are no larger than `micro_batch`."""
        share = self.batch_size // processes
        fit = (count for count in range(1, share + 1) if share % count == 0 and share // count <= self.micro_batch)
        return next(fit, 1)


_SMALL = PretrainingRecipe(size="small", steps=100_000)
PRETRAINING_RECIPES: dict[str, PretrainingRecipe] = {
    "paper": _SMALL,
    # Dropout is off: a run of minutes sees each document once.
    "mini": _SMALL.changed(
        size="mini", steps=600, batch_size=16, learning_rate=1e-3, max_length=256, vocab_size=8_000
    ).changed(dropout=0.0, attention_dropout=0.0, eval_every=100, eval_examples=256, save_every=50, log_every=20),
    "smoke": _SMALL.changed(
        size="tiny", steps=6, batch_size=4, micro_batch=2, warmup=2, learning_rate=1e-3, max_length=64, vocab_size=400
    ).changed(attention_dropout=0.0, eval_every=3, eval_examples=8, save_every=2, log_every=1),
}
"""By preset, each with a size of its own."""

BASE_STEPS = 500_000
"""Of the paper's base model, in place of 100,000 for small."""


def pretraining_recipe(preset: str, size: str | None = None) -> PretrainingRecipe:
    """The recipe of a preset for a size of model.

    >>> pretraining_recipe("paper").steps, pretraining_recipe("paper", "base").steps
    (100000, 500000)
    >>> pretraining_recipe("mini", "small").size
    'small'
    """
    check_choice("--preset", preset, PRESETS)
    recipe = PRETRAINING_RECIPES[preset]
    if size is None:
        return recipe
    check_choice("--size", size, SIZES)
    return replace(recipe, size=size, steps=BASE_STEPS if (preset, size) == ("paper", "base") else recipe.steps)
