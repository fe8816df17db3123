"""The recipes of Long Range Arena: the paper's, and smaller ones."""

from dataclasses import dataclass, fields

from nystromformer.data.lra.listops import ListOpsOptions
from nystromformer.data.lra.pathfinder import PathfinderSetOptions

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
