"""Recipes: the numbers by which each job trains, for the presets `paper`, `mini` (minutes) and `smoke` (seconds).

A recipe is one kind of thing for every job: fields, `changed` by options of the same names, and `arguments`, the fields
of Transformers' `TrainingArguments` that it stands for.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from nystromformer.checks import check_choice
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
    # Dropout is off: a run of minutes sees each document once, and exact attention then never writes its matrix down.
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


# Distillation


@dataclass(frozen=True, kw_only=True)
class DistillationRecipe(Recipe):
    """How a student learns to follow its teacher. The paper has no such recipe: `paper` is the long one.

    >>> DISTILLATION_RECIPES["mini"].changed(steps=100).stage_steps(("layers", "model"))
    {'layers': 50, 'model': 50}
    >>> DISTILLATION_RECIPES["mini"].changed(steps=100).stage_steps(("model",))
    {'model': 100}
    """

    steps: int
    layers_share: float = 0.5
    """Of the steps, which the first stage takes where there are two; one of them costs a third of the second's."""
    layers_rate: float = 5e-4
    """The highest learning rate of the first stage; `learning_rate` is the second's."""
    warmup: float = 0.1
    """Of each stage."""
    chosen_blocks: int = 3
    """Far blocks that each block of `nystrom-local` reads exactly, chosen for their content."""
    eval_every: int
    dev_examples: int = 32
    """Held-out windows that are looked at while training."""
    test_examples: int = 200
    """Held-out windows, and windows of each further corpus, that the result is judged by."""

    def stage_steps(self, stages: tuple[str, ...]) -> dict[str, int]:
        if len(stages) == 1:
            return {stages[0]: self.steps}
        first = min(max(1, round(self.layers_share * self.steps)), self.steps - 1)
        return {stages[0]: first, stages[1]: self.steps - first}

    def arguments(self) -> dict[str, Any]:
        """Fields of `TrainingArguments`."""
        return {
            **self.schedule(self.steps, self.eval_every),
            "adam_beta2": 0.98,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "logging_steps": min(self.eval_every, 20),
            "include_num_input_tokens_seen": "non_padding",
            "ddp_find_unused_parameters": True,  # the first stage trains attention alone
        }


NEAR = {"learning_rate": 1e-5, "layers_rate": 1e-4}
"""Rates for a student whose attention suits its teacher's weights: at the usual ones its error rises at first."""

_LONG = DistillationRecipe(steps=10_000, batch_size=16, learning_rate=3e-5, max_length=512, eval_every=500)
DISTILLATION_RECIPES: dict[str, DistillationRecipe] = {
    "paper": _LONG.changed(test_examples=1_000, dev_examples=64),
    "mini": _LONG.changed(steps=400, batch_size=2, eval_every=50),
    "smoke": _LONG.changed(steps=4, batch_size=2, max_length=48, eval_every=2, dev_examples=4, test_examples=6),
}
"""By preset."""
