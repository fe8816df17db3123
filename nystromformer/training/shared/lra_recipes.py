"""Recipes of Long Range Arena, task by task: the paper's, and what an hour, minutes or seconds allow."""

from dataclasses import dataclass
from typing import Any

from nystromformer.data.lra import Task
from nystromformer.data.lra.listops import ListOpsOptions
from nystromformer.data.lra.pathfinder import PathfinderSetOptions
from nystromformer.training.shared.recipes import ScoredRecipe

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

# Attention dropout is off in the small recipes: without it exact attention never writes its matrix down.
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
