"""Recipes of distillation: how a student learns to follow its teacher, by preset."""

from dataclasses import dataclass
from typing import Any

from nystromformer.training.shared.recipes import Recipe


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
