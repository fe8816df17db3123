"""Pretraining: the recipes, what `pretrain` was asked for, and its run from raw text to curves."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, TrainingArguments

from nystromformer.data.corpus.examples import PretrainingExamples, pretraining_examples
from nystromformer.data.corpus.shards import Corpus, build_corpus, corpus_tokenizer
from nystromformer.data.corpus.text import Reading, corpus_files
from nystromformer.data.lra import as_is
from nystromformer.data.tokenizers import TRAIN, load_tokenizer, read_tokenizer
from nystromformer.errors import user_input
from nystromformer.files import damage_of, whole_folder
from nystromformer.models import NystromformerForPreTraining
from nystromformer.progress import share_bar
from nystromformer.records import Recorder, read_config, read_records
from nystromformer.report.figures import draw_pretraining, pretraining_runs
from nystromformer.training.arguments import Recipe, parse_settings, processes, training_arguments
from nystromformer.training.callbacks import Curves
from nystromformer.training.pretraining_models import SIZES, build_model, special_tokens
from nystromformer.training.pretraining_trainer import (
    Clock,
    EvaluateAtEnd,
    PretrainingTrainer,
    RecordPretraining,
    ShowTokens,
)
from nystromformer.training.run import SAVE_SECONDS, check_folder, run_to_end

TOKENIZER = "tokenizer"
"""The subfolder of a run with its tokenizer: a resumed run uses it."""


@dataclass(frozen=True, kw_only=True)
class PretrainingRecipe(Recipe):
    """How a model is pretrained. The defaults are the paper's.

    >>> recipe = PAPER["small"].changed(steps=1_000, eval_every=200)
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

    def arguments(self) -> dict[str, Any]:
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
    recipe = {"mini": MINI, "smoke": SMOKE}[preset]
    return replace(recipe, size=size or recipe.size)


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
    settings: dict[str, Any]
    """Fields of `TrainingArguments` that the user has set."""
    dtype: str

    def config(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
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


@dataclass(frozen=True, kw_only=True)
class PretrainOptions:
    """The command's options, checked when made."""

    corpora: tuple[str, ...]
    tokenizer: str
    size: str | None
    attention: str
    source: str
    preset: str
    out: Path
    cache: Path
    steps: int | None
    batch_size: int | None
    micro_batch: int | None
    max_length: int | None
    vocab_size: int | None
    eval_every: int | None
    text_column: str
    documents: str
    validation_share: float
    workers: int | None
    beside: tuple[Path, ...]
    seed: int
    resume: bool
    device: str
    dtype: str
    settings: tuple[str, ...]
    save_seconds: float = SAVE_SECONDS

    def __post_init__(self) -> None:
        if not 0 < self.validation_share < 1:
            raise ValueError(
                f"--validation-share {self.validation_share}: must be above 0 and below 1; the paper: 0.2."
            )
        if self.source and self.size:
            raise ValueError(f"--size {self.size} with --from: the model has a size already; leave one of them out.")
        if self.source and self.tokenizer == TRAIN:
            raise ValueError("--tokenizer train with --from: the weights belong to their own tokenizer; leave it out.")
        if not self.source and not self.tokenizer:
            raise ValueError(f"no --tokenizer: give vocab.txt, tokenizer.json, a folder or Hub id, or {TRAIN!r}.")
        for folder in self.beside:
            check_run(folder)
        check_folder(self.out, {}, self.resume)
        _ = self.reading, self.files, self.training.arguments(self.out, self.device)

    @cached_property
    def reading(self) -> Reading:
        return Reading(text_column=self.text_column, division=self.documents)

    @cached_property
    def files(self) -> list[Path]:
        return corpus_files(self.corpora)

    @cached_property
    def training(self) -> Pretraining:
        recipe = recipe_for(self.preset, self.size).changed(
            steps=self.steps,
            batch_size=self.batch_size,
            micro_batch=self.micro_batch,
            max_length=self.max_length,
            vocab_size=self.vocab_size,
            eval_every=self.eval_every,
        )
        return Pretraining(
            preset=self.preset,
            recipe=recipe,
            attention=self.attention,
            source=self.source or None,
            seed=self.seed,
            validation_share=self.validation_share,
            settings=parse_settings(list(self.settings)),
            dtype=self.dtype,
        )


def pretrain(options: PretrainOptions, say: Callable[[str], None]) -> None:
    """Everything that the command was asked for; `say` prints on the first process."""
    training, out = options.training, options.out
    with user_input():
        arguments = training.arguments(out, options.device)
        tokenizer = find_tokenizer(options)
        special = special_tokens(tokenizer)
        # before the corpus, which can take hours: what is wrong with the model shows at once
        model = build_model(training.recipe, options.attention, training.source, special, options.seed)
        corpus = find_corpus(options, tokenizer)
        train, validation = pretraining_examples(
            corpus,
            special,
            max_length=training.recipe.max_length,
            seed=options.seed,
            validation_share=options.validation_share,
            token_types=model.config.type_vocab_size > 1,
        )
        check_folder(out, training.config(corpus, tokenizer), options.resume or not arguments.should_save)
        if arguments.should_save:
            say(
                f"{corpus.documents:,} documents, {corpus.tokens:,} tokens; {len(train):,} examples to train on, "
                f"{len(validation):,} held out; {model.num_parameters():,} parameters"
            )
    record = run_pretraining(
        training,
        model,
        tokenizer,
        train,
        validation,
        out,
        arguments,
        resume=options.resume,
        save_seconds=options.save_seconds,
    )
    if arguments.should_save:
        with user_input():  # the disk may be full
            for name, drawing in draw_pretraining(read_records(out, *options.beside)).items():
                drawing.save(out / name)
        order = "" if record["sop_accuracy"] is None else f", {record['sop_accuracy']:.2%} of the sentence orders"
        say(
            f"{record['value']:.2%} of the masked words right{order} on {record['validation_examples']:,} validation "
            f"examples, after {record['step']:,} steps, {record['tokens']:,} tokens and {record['seconds']:,.0f} s of "
            f"training ({record['tokens_per_second']:,.0f} tokens/s)\nModel, records and curves: {out}"
        )


def run_pretraining(
    run: Pretraining,
    model: NystromformerForPreTraining,
    tokenizer: PreTrainedTokenizerFast,
    train_examples: PretrainingExamples,
    validation: PretrainingExamples,
    out: Path,
    arguments: TrainingArguments,
    *,
    resume: bool,
    save_seconds: float = SAVE_SECONDS,
) -> dict[str, Any]:
    """Train to the end and keep the last model and the tokenizer. Returns the last record."""
    corpus, clock = train_examples.corpus, Clock()
    title = f"{run.recipe.size} {run.attention}" if run.source is None else f"{Path(run.source).name} {run.attention}"

    def make_trainer(recorder: Recorder) -> PretrainingTrainer:
        if arguments.should_save:
            with whole_folder(out / TOKENIZER, replace=True, checksums=True) as folder:
                tokenizer.save_pretrained(folder)
        return PretrainingTrainer(
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

    def measure(trainer: PretrainingTrainer) -> tuple[float, dict[str, Any]]:
        """The last evaluation is that of the last step."""
        state = trainer.state
        metrics = next(entry for entry in reversed(state.log_history) if "eval_mlm_accuracy" in entry)
        seconds = clock.seconds or clock.seconds_of(state)  # a run killed after its last step does not train any more
        return metrics["eval_mlm_accuracy"], {
            "step": state.global_step,
            "sop_accuracy": metrics.get("eval_sop_accuracy"),
            "seconds": round(seconds, 3),
            "tokens": state.num_input_tokens_seen,
            "tokens_per_second": round(state.num_input_tokens_seen / max(seconds, 1e-9), 1),
            "validation_examples": len(trainer.eval_dataset),
            "train_examples": len(train_examples),
            "corpus_documents": corpus.documents,
            "corpus_tokens": corpus.tokens,
            "parameters": trainer.model.num_parameters(),
        }

    return run_to_end(
        out,
        arguments,
        job="pretrain",
        config=run.config(corpus, tokenizer),
        seed=run.seed,
        resume=resume,
        save_seconds=save_seconds,
        make_trainer=make_trainer,
        measure=measure,
    )


def check_run(folder: Path) -> None:
    try:
        found = pretraining_runs(read_records(folder))
    except FileNotFoundError:
        found = []
    if not found:
        raise ValueError(f"--beside {folder}: holds no records of a pretraining run; give the --out folder of one.")


def find_tokenizer(options: PretrainOptions) -> PreTrainedTokenizerFast:
    if options.tokenizer != TRAIN:
        return load_tokenizer(options.tokenizer or options.source)
    kept = options.out / TOKENIZER
    if options.resume and read_config(options.out) is not None and damage_of(kept) is None:
        return read_tokenizer(kept / "tokenizer.json")  # as one that was just trained: a folder adds notes of its own
    vocab_size = options.training.recipe.vocab_size
    with share_bar("training the tokenizer") as report:
        return corpus_tokenizer(options.files, options.reading, vocab_size, options.cache, report)


def find_corpus(options: PretrainOptions, tokenizer: PreTrainedTokenizerFast) -> Corpus:
    content = tokenizer.backend_tokenizer.to_str()
    with share_bar("tokenizing the corpus") as report:
        return build_corpus(
            options.files, options.reading, content, options.cache, workers=options.workers, report=report
        )
