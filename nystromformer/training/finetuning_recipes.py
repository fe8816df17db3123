"""How models are fine-tuned: the paper's recipe, and smaller ones."""

from dataclasses import dataclass

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
