"""Pretraining: the recipes, the model, and one run."""

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from transformers import PreTrainedTokenizerFast, TrainingArguments, set_seed

from nystromformer.data.corpus.examples import PretrainingExamples, SpecialTokens
from nystromformer.data.corpus.shards import Corpus
from nystromformer.data.lra import as_is
from nystromformer.models import NystromformerForPreTraining, NystromformerPreTrainedModel, preset_config
from nystromformer.models.conversion import convert_model, convert_own, load_source, transfer
from nystromformer.records import RESULTS, Recorder, result_in
from nystromformer.training.arguments import processes, training_arguments
from nystromformer.training.callbacks import Curves
from nystromformer.training.pretraining_trainer import (
    Clock,
    EvaluateAtEnd,
    PretrainingTrainer,
    RecordPretraining,
    ShowTokens,
)
from nystromformer.training.trainer import finish, prepare_folder, train

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


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> SpecialTokens:
    return SpecialTokens(
        cls=tokenizer.cls_token_id,
        sep=tokenizer.sep_token_id,
        pad=tokenizer.pad_token_id,
        mask=tokenizer.mask_token_id,
        all=tuple(sorted(tokenizer.all_special_ids)),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
    )


def build_model(
    recipe: PretrainingRecipe, attention: str, source: str | None, special: SpecialTokens, seed: int
) -> NystromformerForPreTraining:
    """Raises `ValueError` for an attention, a length or a vocabulary that the model can't have."""
    if recipe.max_length < 8:
        raise ValueError(f"--max-length {recipe.max_length}: must be at least 8; the paper uses 512.")
    set_seed(seed)
    model = _from_scratch(recipe, attention, special) if source is None else _from_source(recipe, attention, source)
    config = model.config
    if recipe.max_length > config.max_position_embeddings:
        raise ValueError(
            f"--max-length {recipe.max_length}: {source} has positions for {config.max_position_embeddings} tokens; "
            f"lengthen it with `nystromformer convert {source} DST --max-length {recipe.max_length}`, start from DST."
        )
    if special.vocab_size > config.vocab_size:
        raise ValueError(
            f"--tokenizer: has {special.vocab_size:,} tokens, but {source} has embeddings for {config.vocab_size:,}; "
            f"leave --tokenizer out to use the model's own."
        )
    config.pad_token_id = special.pad
    return model


def _from_scratch(recipe: PretrainingRecipe, attention: str, special: SpecialTokens) -> NystromformerForPreTraining:
    config = preset_config(
        "bert-base",
        **SIZES[recipe.size],
        attention=attention,
        vocab_size=special.vocab_size,
        max_position_embeddings=recipe.max_length,
        pad_token_id=special.pad,
        hidden_dropout_prob=recipe.dropout,
        attention_probs_dropout_prob=recipe.attention_dropout,
    )
    return NystromformerForPreTraining(config)


def _from_source(recipe: PretrainingRecipe, attention: str, source: str) -> NystromformerForPreTraining:
    theirs, _ = load_source(source)
    changes = {
        "attention": attention,
        "hidden_dropout_prob": recipe.dropout,
        "attention_probs_dropout_prob": recipe.attention_dropout,
    }
    is_own = isinstance(theirs, NystromformerPreTrainedModel)
    return with_pretraining_heads((convert_own if is_own else convert_model)(theirs, **changes).model.float())


def with_pretraining_heads(model: NystromformerPreTrainedModel) -> NystromformerForPreTraining:
    """The same encoder with both heads; those that `model` has are kept, others start at random."""
    if isinstance(model, NystromformerForPreTraining):
        return model
    made = NystromformerForPreTraining(model.config)
    own, prefix = made.state_dict(), model.base_model_prefix + "."
    state = model.state_dict()
    transfer(
        state,
        made,
        {key: next((name for name in (key, prefix + key) if name in own), None) for key in state},
        notes={},
        why_left=lambda key, tensor: "no part of pretraining",
        start_at_zero="$^",
    )
    return made


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """Everything that decides what comes out, but for the corpus and the tokenizer."""

    preset: str
    recipe: PretrainingRecipe
    attention: str
    source: str | None
    """The model whose weights it starts from; None is from scratch."""
    seed: int
    validation_share: float
    settings: dict[str, object]
    """Fields of `TrainingArguments` that the user has set."""
    dtype: str

    def config(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> dict[str, object]:
        """As it is noted in the folder and in each record."""
        recipe = {name: value for name, value in vars(self.recipe).items() if name != "vocab_size"}
        recipe["size"] = self.recipe.size if self.source is None else None
        return {
            "preset": self.preset,
            "attention": self.attention,
            "from": self.source,
            **recipe,
            "seed": self.seed,
            "validation_share": self.validation_share,
            "corpus": corpus.digest,
            "tokenizer": sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16],
            "settings": self.settings,
            "dtype": self.dtype,
            "processes": processes(),
        }

    def arguments(self, out: Path, device: str) -> TrainingArguments:
        recipe = self.recipe
        if recipe.batch_size < 1 or recipe.batch_size % processes():
            raise ValueError(
                f"--batch-size {recipe.batch_size}: must be at least 1 and divisible by {processes()} processes."
            )
        return training_arguments(
            out,
            batch_size=recipe.batch_size,
            seed=self.seed,
            device=device,
            dtype=self.dtype,
            defaults=recipe.arguments(),
            settings={"gradient_accumulation_steps": recipe.accumulation(processes()), **self.settings},
        )


def run_pretraining(
    run: Pretraining,
    model: NystromformerForPreTraining,
    tokenizer: PreTrainedTokenizerFast,
    train_examples: PretrainingExamples,
    validation: PretrainingExamples,
    out: Path,
    arguments: TrainingArguments,
    resume: bool,
) -> dict[str, object]:
    """Train to the end and keep the last model. Returns the last record."""
    corpus = train_examples.corpus
    config = run.config(corpus, tokenizer)
    with arguments.main_process_first():  # the others find the folder as it shall be
        prepare_folder(out, config, resume or not arguments.should_save)
    if (done := result_in(out)) is not None:
        return done
    recorder, clock = Recorder(out, job="pretrain", config=config, seed=run.seed), Clock()
    title = f"{run.recipe.size} {run.attention}" if run.source is None else f"{Path(run.source).name} {run.attention}"
    trainer = PretrainingTrainer(
        model=model,
        args=arguments,
        data_collator=as_is,
        train_dataset=train_examples,
        eval_dataset=validation.some(run.recipe.eval_examples),
        processing_class=tokenizer,
        callbacks=[
            clock,
            EvaluateAtEnd(),
            ShowTokens(title, clock),
            RecordPretraining(recorder, clock),
            Curves(out),
        ],
    )
    train(trainer)
    finish(trainer)
    if arguments.should_save:
        state = trainer.state
        metrics = next(entry for entry in reversed(state.log_history) if "eval_mlm_accuracy" in entry)
        seconds = clock.seconds or clock.seconds_of(state)  # a run killed after its last step does not train any more
        recorder.record(
            RESULTS["pretrain"],
            metrics["eval_mlm_accuracy"],
            step=state.global_step,
            sop_accuracy=metrics.get("eval_sop_accuracy"),
            seconds=round(seconds, 3),
            tokens=state.num_input_tokens_seen,
            tokens_per_second=round(state.num_input_tokens_seen / max(seconds, 1e-9), 1),
            validation_examples=len(trainer.eval_dataset),
            train_examples=len(train_examples),
            corpus_documents=corpus.documents,
            corpus_tokens=corpus.tokens,
            parameters=trainer.model.num_parameters(),
        )
    trainer.accelerator.wait_for_everyone()
    return result_in(out)
