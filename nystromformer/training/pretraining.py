"""Pretraining: what `pretrain` was asked for, its model, its trainer for two objectives at once, and its run from raw
text to curves.

A model is new, in one of five sizes, or has the weights of another one, with both heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TrainingArguments, set_seed
from transformers.trainer_utils import EvalLoopOutput

from nystromformer.data.corpus.examples import PretrainingExamples, SpecialTokens, pretraining_examples
from nystromformer.data.corpus.shards import Corpus, build_corpus, corpus_tokenizer
from nystromformer.data.lra import as_is
from nystromformer.data.tokenizers import TRAIN, load_tokenizer, read_tokenizer
from nystromformer.errors import user_input
from nystromformer.files import damage_of, whole_folder
from nystromformer.models import NystromformerForPreTraining, NystromformerPreTrainedModel, preset_config
from nystromformer.models.conversion import convert_model, convert_own, load_source, transfer
from nystromformer.models.heads import IGNORED
from nystromformer.progress import share_bar
from nystromformer.records import Recorder, read_config, read_records
from nystromformer.report.figures import draw_pretraining, pretraining_runs
from nystromformer.training import SAVE_SECONDS, SIZES
from nystromformer.training.run import check_folder, run_to_end
from nystromformer.training.shared.arguments import CorpusOptions, Run, processes
from nystromformer.training.shared.callbacks import Clock, callbacks_of
from nystromformer.training.shared.recipes import PretrainingRecipe, pretraining_recipe
from nystromformer.training.trainer import ExactTrainer, Keys, LongestFirst

TOKENIZER = "tokenizer"
"""The subfolder of a run with its tokenizer: a resumed run uses it."""

SUMS = ("mlm_loss_sum", "mlm_count", "mlm_correct", "sop_loss_sum", "sop_count", "sop_correct")
"""What the model counts of both objectives."""


@dataclass(frozen=True, kw_only=True)
class Pretraining(Run):
    """One run of `pretrain`; the corpus and the tokenizer are its data."""

    job = "pretrain"
    recipe: PretrainingRecipe
    source: str | None
    """The model whose weights it starts from; None is from scratch."""
    validation_share: float

    def config_with(self, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
        config = {name: value for name, value in self.config().items() if name not in ("source", "vocab_size")}
        return config | {
            "from": self.source,
            "size": self.recipe.size if self.source is None else None,
            "corpus": corpus.digest,
            "tokenizer": sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16],
        }

    def arguments(self, out: Path, device: str) -> TrainingArguments:
        return self.training_arguments(out, device, self.recipe.arguments(processes()))


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(CorpusOptions):
    """What `pretrain` was asked for, checked when made."""

    tokenizer: str
    size: str | None
    attention: str
    source: str
    cache: Path
    validation_share: float
    workers: int | None
    beside: list[Path] | None

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
        for folder in self.beside or ():
            check_run(folder)
        check_folder(self.out, {}, self.resume)
        _ = self.reading, self.files, self.training.arguments(self.out, self.device)

    @cached_property
    def training(self) -> Pretraining:
        return Pretraining(
            preset=self.preset,
            recipe=pretraining_recipe(self.preset, self.size).changed(**self.changes),
            attention=self.attention,
            source=self.source or None,
            seed=self.seed,
            validation_share=self.validation_share,
            settings=self.parsed_settings,
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
        check_folder(out, training.config_with(corpus, tokenizer), options.resume or not arguments.should_save)
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
            for name, drawing in draw_pretraining(read_records(out, *(options.beside or ()))).items():
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
            callbacks=callbacks_of(out, title, recorder, clock),
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
        job=run.job,
        config=run.config_with(corpus, tokenizer),
        seed=run.seed,
        resume=resume,
        save_seconds=save_seconds,
        make_trainer=make_trainer,
        measure=measure,
    )


def check_run(folder: Path) -> None:
    try:
        found = pretraining_runs(read_records(folder))
    except (FileNotFoundError, NotADirectoryError):
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
    changes: dict[str, Any] = {
        "attention": attention,
        "hidden_dropout_prob": recipe.dropout,
        "attention_probs_dropout_prob": recipe.attention_dropout,
    }
    is_own = isinstance(theirs, NystromformerPreTrainedModel)
    return with_pretraining_heads((convert_own if is_own else convert_model)(theirs, **changes).model.float())


class PretrainingTrainer(ExactTrainer):
    """Each objective is divided by its own count, over all micro-batches and processes of a step."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return Keys(super()._get_train_sampler(train_dataset))

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor:
        counts = NystromformerForPreTraining.count_items(batch_samples).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.reduce(counts, reduction="sum")
        return counts

    @torch.no_grad()
    def evaluation_loop(
        self, dataloader: Any, description: str, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> EvalLoopOutput:
        """Exact accuracies and losses on the validation examples, each of them seen by one process once."""
        examples = dataloader.dataset
        order = list(LongestFirst(examples.lengths))
        rank, world, size = self.args.process_index, self.args.world_size, self.args.eval_batch_size
        share = order[rank::world]
        self.model.eval()
        self.callback_handler.eval_dataloader = dataloader
        sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.args.device)
        for start in range(0, -(-len(order) // world), size):
            batch = examples.batch(share[start : start + size] or order[:1])
            if start >= len(share):  # a process that has no more goes along, since sharded models need all of them
                batch["labels"].fill_(IGNORED)
                batch["sentence_order_label"].fill_(IGNORED)
            out = self.model(**self._prepare_inputs(batch))
            sums += torch.stack([out[name].double() for name in SUMS])
            self.control: Any = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        metrics = means(self.accelerator.reduce(sums, reduction="sum").tolist())
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(order))


def means(sums: list[float]) -> dict[str, float]:
    """Accuracies and losses from the sums over all examples. An objective without any item is left out.

    >>> means([6.0, 3.0, 1.0, 0.0, 0.0, 0.0])
    {'mlm_accuracy': 0.3333333333333333, 'mlm_loss': 2.0, 'loss': 2.0}
    """
    found: dict[str, float] = {}
    for name, (loss, count, correct) in {"mlm": sums[:3], "sop": sums[3:]}.items():
        if count:
            found |= {f"{name}_accuracy": correct / count, f"{name}_loss": loss / count}
    return found | {"loss": sum(value for name, value in found.items() if name.endswith("_loss"))}
