"""Pretraining as the command line asks for it: tokenizer, model, corpus, training, curves."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from nystromformer.data.corpus.examples import pretraining_examples
from nystromformer.data.corpus.shards import Corpus, build_corpus, corpus_tokenizer
from nystromformer.data.corpus.text import Reading, corpus_files
from nystromformer.data.tokenizers import TRAIN, load_tokenizer
from nystromformer.errors import UserError, user_input
from nystromformer.progress import share_bar
from nystromformer.records import read_records
from nystromformer.report.pretraining_curves import draw_curves, runs_of
from nystromformer.training.arguments import parse_settings
from nystromformer.training.pretraining import Pretraining, build_model, recipe_for, run_pretraining, special_tokens
from nystromformer.training.trainer import check_folder

TOKENIZER = "tokenizer"
"""The subfolder of a run with its tokenizer: a resumed run uses it."""


@dataclass(frozen=True, kw_only=True)
class PretrainOptions:
    """The command's options, checked when made."""

    corpora: tuple[str, ...]
    tokenizer: str
    size: str
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

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "micro_batch", "max_length", "vocab_size", "eval_every", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least 1.")
        if self.seed < 0:
            raise ValueError(f"--seed {self.seed}: must be at least 0.")
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
        recipe = recipe_for(self.preset, self.size or None).changed(
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


def run(options: PretrainOptions, say: Callable[[str], None]) -> None:
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
            if not (options.resume and (out / TOKENIZER).exists()):
                keep_tokenizer(tokenizer, out)
            say(
                f"{corpus.documents:,} documents, {corpus.tokens:,} tokens; {len(train):,} examples to train on, "
                f"{len(validation):,} held out; {model.num_parameters():,} parameters"
            )
    try:
        record = run_pretraining(training, model, tokenizer, train, validation, out, arguments, options.resume)
    except OSError as error:  # the disk is full or gone: what is written is whole
        raise UserError(f"{error}; when there is room again, go on with --resume.") from error
    if arguments.should_save:
        draw_curves(read_records(out, *options.beside), out)
        order = "" if record["sop_accuracy"] is None else f", {record['sop_accuracy']:.2%} of the sentence orders"
        say(
            f"{record['value']:.2%} of the masked words right{order} on {record['validation_examples']:,} validation "
            f"examples, after {record['step']:,} steps, {record['tokens']:,} tokens and {record['seconds']:,.0f} s of "
            f"training ({record['tokens_per_second']:,.0f} tokens/s)\nModel, records and curves: {out}"
        )


def check_run(folder: Path) -> None:
    try:
        found = runs_of(read_records(folder))
    except FileNotFoundError:
        found = []
    if not found:
        raise ValueError(f"--beside {folder}: holds no records of a pretraining run; give the --out folder of one.")


def find_tokenizer(options: PretrainOptions) -> PreTrainedTokenizerFast:
    if options.tokenizer != TRAIN:
        return load_tokenizer(options.tokenizer or options.source)
    if options.resume and (options.out / TOKENIZER).is_dir():
        return load_tokenizer(str(options.out / TOKENIZER))
    vocab_size = options.training.recipe.vocab_size
    with share_bar("training the tokenizer") as report:
        return corpus_tokenizer(options.files, options.reading, vocab_size, options.cache, report)


def find_corpus(options: PretrainOptions, tokenizer: PreTrainedTokenizerFast) -> Corpus:
    content = tokenizer.backend_tokenizer.to_str()
    with share_bar("tokenising the corpus") as report:
        return build_corpus(
            options.files, options.reading, content, options.cache, workers=options.workers, report=report
        )


def keep_tokenizer(tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Whole or absent."""
    aside = out / f".{TOKENIZER}"
    shutil.rmtree(aside, ignore_errors=True)
    tokenizer.save_pretrained(aside)
    shutil.rmtree(out / TOKENIZER, ignore_errors=True)
    os.replace(aside, out / TOKENIZER)
