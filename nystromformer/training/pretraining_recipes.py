"""The recipes of pretraining: the paper's, and smaller ones."""

from dataclasses import dataclass, replace

SIZES: dict[str, dict[str, object]] = {
    # tiny and mini are the smallest that BERT's authors released.
    "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
    "mini": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    "small": {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048},
    "minilm": {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}
"""The paper's are small and base. MiniLM-L6 is there to start from, and to put beside it."""


@dataclass(frozen=True, kw_only=True)
class PretrainingRecipe:
    """How a model is pretrained. The defaults are the paper's."""

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

    def arguments(self) -> dict[str, object]:
        """Fields of `TrainingArguments`."""
        return {
            "max_steps": self.steps,
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup,
            "lr_scheduler_type": "linear",
            "optim": "adamw_torch",
            "adam_beta1": 0.9,
            "adam_beta2": 0.999,
            "adam_epsilon": 1e-6,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
            "eval_strategy": "steps",
            "eval_steps": self.eval_every,
            "save_strategy": "steps",
            "save_steps": self.save_every,
            "logging_steps": self.log_every,
            "dataloader_num_workers": 2,
            "include_num_input_tokens_seen": "non_padding",
        }

    def accumulation(self, processes: int) -> int:
        """Micro-batches of a step on each process: the fewest that are no larger than `micro_batch`."""
        share = self.batch_size // processes
        return next(count for count in range(1, share + 1) if share % count == 0 and share // count <= self.micro_batch)

    def changed(self, *, steps: int | None = None, **changes: object) -> "PretrainingRecipe":
        """With some fields changed. Warm-up and intervals shrink with the number of steps.

        >>> recipe = PAPER["small"].changed(steps=1_000, eval_every=200)
        >>> recipe.warmup, recipe.eval_every, recipe.save_every
        (100, 200, 1000)
        """
        shrunk: dict[str, object] = {}
        if steps is not None:
            shrunk = {name: min(getattr(self, name), steps) for name in ("eval_every", "save_every", "log_every")}
            shrunk |= {"steps": steps, "warmup": round(self.warmup * min(1.0, steps / self.steps))}
        return replace(self, **shrunk | {name: value for name, value in changes.items() if value is not None})


PAPER = {
    "small": PretrainingRecipe(size="small", steps=100_000),
    "base": PretrainingRecipe(size="base", steps=500_000),
}
# Dropout is off: a run of minutes sees each document once, and exact attention never writes its matrix down without.
MINI = PretrainingRecipe(
    size="mini",
    steps=600,
    batch_size=16,
    micro_batch=16,
    warmup=60,
    learning_rate=1e-3,
    max_length=256,
    vocab_size=8_000,
    dropout=0.0,
    attention_dropout=0.0,
    eval_every=100,
    eval_examples=256,
    save_every=50,
    log_every=20,
)
SMOKE = PretrainingRecipe(
    size="tiny",
    steps=6,
    batch_size=4,
    micro_batch=2,
    warmup=2,
    learning_rate=1e-3,
    max_length=64,
    vocab_size=400,
    attention_dropout=0.0,
    eval_every=3,
    eval_examples=8,
    save_every=2,
    log_every=1,
)
PRESETS = ("paper", "mini", "smoke")


def recipe_for(preset: str, size: str | None) -> PretrainingRecipe:
    """The recipe of a preset for a size of model; each preset has a size of its own by default.

    >>> recipe_for("paper", None).steps, recipe_for("paper", "base").steps, recipe_for("mini", "small").size
    (100000, 500000, 'small')
    """
    if preset not in PRESETS:
        raise ValueError(f"--preset {preset}: must be one of {', '.join(PRESETS)}.")
    if size is not None and size not in SIZES:
        raise ValueError(f"--size {size}: must be one of {', '.join(SIZES)}; the paper's are small and base.")
    if preset == "paper":
        return PAPER["base"] if size == "base" else replace(PAPER["small"], size=size or "small")
    return replace({"mini": MINI, "smoke": SMOKE}[preset], **({} if size is None else {"size": size}))
