"""Distillation of encoders of text: what `distill` was asked for, and its run from teacher and corpus to model card."""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import AutoModel, PreTrainedModel, TrainingArguments
from transformers import PreTrainedTokenizerBase as Tokenizer

from nystromformer.attention.registry import parse_attention_name
from nystromformer.checks import check_choice, check_odd, parse_names
from nystromformer.data.corpus.text import corpus_files
from nystromformer.data.corpus.windows import Windows, read_windows
from nystromformer.data.lra import as_is
from nystromformer.errors import user_input
from nystromformer.files import read_object, write_text
from nystromformer.integrations import register
from nystromformer.integrations.hf.guarded_models import refuse
from nystromformer.integrations.hf.layer_attentions import EXACT, is_listed, layer_choice, set_layers
from nystromformer.integrations.hf.modules import interface_modules
from nystromformer.integrations.hf.skip_convolution import add_skip_convolution
from nystromformer.integrations.offered import EXACT_BELOW, OPTIONS, chosen
from nystromformer.models.loading import load_checkpoint, refuse_lacking, wrong_keys
from nystromformer.models.model import quiet_transformers
from nystromformer.progress import share_bar, steps_bar
from nystromformer.records import Recorder, read_records
from nystromformer.report.figures import draw_distillation
from nystromformer.report.table import print_tables, tables_markdown
from nystromformer.report.tables import closeness_table, distillation_tables
from nystromformer.training.distillation.fidelity import (
    HELD_OUT,
    Budget,
    Candidate,
    Sensitivity,
    candidate_names,
    choose,
    chosen_layers,
    judge,
    measure_sensitivity,
)
from nystromformer.training.distillation.model import STAGES, Distillation
from nystromformer.training.distillation.recipes import DISTILLATION_RECIPES, NEAR, DistillationRecipe
from nystromformer.training.distillation.trainer import (
    CoreClock,
    DistillationTrainer,
    model_card,
    pooling_of,
    sentence_modules,
)
from nystromformer.training.finetuning.models import ATTENTION_DROPOUTS, Source, with_positions
from nystromformer.training.run import check_folder, run_to_end
from nystromformer.training.shared.arguments import CorpusOptions, Run
from nystromformer.training.shared.callbacks import callbacks_of
from nystromformer.training.sweep import TABLE

SENSITIVITY = "sensitivity.json"
"""In a run's folder: what was measured of the layers before training, by which a resumed run chooses the same."""

SENSITIVITY_WINDOWS = 4


@dataclass(frozen=True, kw_only=True)
class DistillationRun(Run):
    """One run of `distill`; the corpora are its data."""

    job = "distill"
    recipe: DistillationRecipe
    model: str
    stages: tuple[str, ...]
    layers: tuple[str, ...]
    """The attention of each layer."""
    conv_kernel_size: int | None

    @property
    def stage_steps(self) -> dict[str, int]:
        return self.recipe.stage_steps(self.stages)


@dataclass(frozen=True)
class DistillationData:
    """Windows of text."""

    train: Windows
    judged: dict[str, Windows]
    """By name; what is held out of the training corpus comes first."""

    def digest(self) -> dict[str, Any]:
        return {"corpus": self.train.digest(), "judged": {name: each.digest() for name, each in self.judged.items()}}


@dataclass(frozen=True, kw_only=True)
class DistillOptions(CorpusOptions):
    """What `distill` was asked for, checked when made."""

    model: str
    judge: list[str] | None
    attention: str
    stages: str
    layers: str
    budget: str
    conv_kernel_size: int
    tokenizer: str
    held_out_share: float

    def __post_init__(self) -> None:
        register()
        chosen(self.attention, {})
        if self.conv_kernel_size:
            check_odd("--conv-kernel-size", self.conv_kernel_size)
        if self.budget and self.layers:
            raise ValueError("--budget chooses the layers: leave out --layers, or --budget.")
        self.source.check_length(self.max_length)
        refuse_linear(self.source)
        check_folder(self.out, {}, self.resume)
        _ = self.files, self.judged_files, self.chosen_stages, self.layer_budget
        arguments = self.run(()).training_arguments(self.out, self.device, self.recipe.arguments())
        if arguments.fsdp or arguments.deepspeed:
            raise ValueError(
                "--set fsdp, deepspeed: the teacher stays whole beside its student, so that models are not sharded; "
                "start several processes with torchrun alone."
            )

    @cached_property
    def source(self) -> Source:
        return Source(name=self.model)

    @cached_property
    def recipe(self) -> DistillationRecipe:
        near = NEAR if parse_attention_name(self.attention)[0].suits_trained_weights else {}
        recipe = DISTILLATION_RECIPES[self.preset].changed(**near).changed(**self.changes)
        room = self.source.max_length
        if "max_length" not in self.changes and room is not None:  # only a length that was asked for lengthens a model
            recipe = recipe.changed(max_length=min(recipe.max_length, room))
        return recipe

    @property
    def max_length(self) -> int:
        return self.recipe.max_length

    @cached_property
    def judged_files(self) -> dict[str, list[Path]]:
        return {Path(name).name: corpus_files((name,), option="--judge") for name in self.judge or ()}

    @cached_property
    def chosen_stages(self) -> tuple[str, ...]:
        given = parse_names("--stages", self.stages)
        for stage in given:
            check_choice("--stages", stage, STAGES)
        stages = tuple(stage for stage in STAGES if stage in given)
        if self.recipe.steps < len(stages):
            raise ValueError(f"--steps {self.recipe.steps}: {len(stages)} stages need a step each.")
        return stages

    @cached_property
    def layer_budget(self) -> Budget | None:
        return Budget.parse(self.budget) if self.budget else None

    @property
    def attention_options(self) -> dict[str, Any]:
        """Short texts stay exact, as in every model that is given our attention, but never what is trained on."""
        return {
            "exact_below": min(EXACT_BELOW, self.max_length // 2),
            "chosen_blocks": self.recipe.chosen_blocks,
        }

    def run(self, layers: tuple[str, ...]) -> DistillationRun:
        return DistillationRun(
            preset=self.preset,
            attention=self.attention,
            seed=self.seed,
            recipe=self.recipe,
            settings=self.parsed_settings,
            dtype=self.dtype,
            model=self.model,
            stages=self.chosen_stages,
            layers=layers,
            conv_kernel_size=self.conv_kernel_size or None,
        )

    def read(self, tokenizer: Tokenizer) -> DistillationData:
        recipe = self.recipe
        read = partial(read_windows, reading=self.reading, tokenizer=tokenizer, max_length=self.max_length)
        with share_bar("reading the corpus") as report:
            train, held_out = read(
                self.files,
                train=recipe.steps * recipe.batch_size,
                held_out=recipe.test_examples,
                share=self.held_out_share,
                report=report,
            )
        judged = {HELD_OUT: held_out}
        for name, files in self.judged_files.items():
            judged[name] = read(files, train=0, held_out=recipe.test_examples, share=1.0)[1]
        return DistillationData(train, judged)


def refuse_linear(source: Source) -> None:
    """A teacher has exact attention."""
    if source.attention != EXACT:
        raise ValueError(
            f"{source.name} has linear attention already ({source.attention}): give the model with exact attention "
            f"that it came from."
        )
    if source.is_own:
        raise ValueError(
            f"{source.name} is one of our own models, with attention of its configuration: make it a BERT with "
            f"`nystromformer convert --to bert` and distill that."
        )


def load_teacher(source: Source, max_length: int) -> PreTrainedModel:
    """The encoder with exact attention, and with positions for `max_length` tokens."""
    model, info = load_checkpoint(AutoModel, source.name)
    refuse_lacking(source.name, model, {key for key in wrong_keys(info) if "pooler" not in key})
    attentions = list(interface_modules(model))
    if not attentions:
        refuse(model)
    if not any(map(is_listed, attentions)):
        raise ValueError(
            f"{source.name}: {type(model).__name__} has causal attention only, of earlier tokens; attention of "
            f"linear cost is for encoders: give one, such as BERT."
        )
    room = source.max_length
    return with_positions(model, max_length) if room is not None and max_length > room else model


def make_student(
    teacher: PreTrainedModel, layers: tuple[str, ...], options: dict[str, Any], kernel_size: int | None
) -> PreTrainedModel:
    """A copy of the teacher with the attention of each layer, and convolutions that start at zero."""
    with quiet_transformers():
        student = copy.deepcopy(teacher)
        for dropout in ATTENTION_DROPOUTS:
            if hasattr(student.config, dropout):
                setattr(student.config, dropout, 0.0)
        known = [choice.name for name in layers if (choice := layer_choice(name, {})) is not None]
        set_layers(student, layers, {o: value for o, value in options.items() if any(o in OPTIONS[n] for n in known)})
        return student if kernel_size is None else add_skip_convolution(student, kernel_size)


def distill(options: DistillOptions, say: Callable[[str], None]) -> None:
    """Everything that the command was asked for; `say` prints on the first process."""
    out = options.out
    with user_input():
        arguments = options.run(()).training_arguments(out, options.device, options.recipe.arguments())
        tell = say if arguments.should_save else (lambda _: None)
        tokenizer = options.source.tokenizer(options.tokenizer)
        teacher = load_teacher(options.source, options.max_length).eval()
        pooling = pooling_of(options.model)
        data = options.read(tokenizer)
        tokenizer.model_max_length = max(tokenizer.model_max_length, options.max_length)
        with arguments.main_process_first():  # one measures, the others read
            sensitivity, layers = find_layers(options, teacher, data, arguments)
        run = options.run(tuple(layers))
        check_folder(out, run.config() | data.digest(), options.resume or not arguments.should_save)
        student = make_student(teacher, run.layers, options.attention_options, run.conv_kernel_size)
        tell(
            f"{len(data.train):,} windows of text to train on, {len(data.judged[HELD_OUT]):,} held out; "
            f"{', '.join(layers)}"
        )
    record = run_distillation(
        run, Distillation(teacher, student, pooling), tokenizer, data, sensitivity, options, arguments
    )
    if arguments.should_save:
        with user_input():  # the disk may be full
            tables = distillation_tables([record])
            write_text(out / TABLE, tables_markdown(tables))
            for name, drawing in draw_distillation(read_records(out)).items():
                drawing.save(out / name)
        print_tables(tables)
        speed = record["speed"]
        tell(
            f"cosine {record['value']:.4f} to exact attention (worst {record['parts'][HELD_OUT]['worst']:.4f}), "
            f"{speed['exact'] / speed['ours']:.2f} times as fast at {speed['length']:,} tokens, after "
            f"{record['core_seconds'] / 60:.1f} core-minutes\nModel, card, records and curves: {out}"
        )


def find_layers(
    options: DistillOptions, teacher: PreTrainedModel, data: DistillationData, arguments: TrainingArguments
) -> tuple[Sensitivity, list[str]]:
    """What each layer bears, and the attention it gets."""
    path = options.out / SENSITIVITY
    if path.exists() and (options.resume or not arguments.should_save):
        noted = read_object(path)
        return [{each["name"]: Candidate(**each) for each in layer} for layer in noted["layers"]], noted["chosen"]
    windows = data.judged[HELD_OUT].some(SENSITIVITY_WINDOWS)
    batches = [windows.batch([index]) for index in range(len(windows))]
    teacher.to(arguments.device)
    batches = [{name: each.to(arguments.device) for name, each in batch.items()} for batch in batches]
    names = candidate_names(options.attention)
    count = sum(map(is_listed, interface_modules(teacher)))
    layers = chosen_layers(options.layers, options.attention, count)
    with steps_bar(len(batches)) as step:
        sensitivity = measure_sensitivity(teacher, batches, names, options.attention_options, step)
    if options.layer_budget is not None:
        layers = choose(sensitivity, options.layer_budget)
    if set(layers) == {EXACT}:
        raise ValueError(
            f"--budget {options.budget}: exact attention would stay in all layers, since nothing else within it is "
            f"faster at {windows.lengths.max()} tokens; give a larger budget or a larger --max-length."
        )
    noted = {"layers": [[vars(each) for each in layer.values()] for layer in sensitivity], "chosen": layers}
    write_text(path, json.dumps(noted, indent=2) + "\n")
    return sensitivity, layers


def run_distillation(
    run: DistillationRun,
    distillation: Distillation,
    tokenizer: Tokenizer,
    data: DistillationData,
    sensitivity: Sensitivity,
    options: DistillOptions,
    arguments: TrainingArguments,
) -> dict[str, Any]:
    """Train to the end, judge the student, and keep it with its card. Returns the last record."""
    out, clock, recipe = options.out, CoreClock(), run.recipe
    config = run.config() | data.digest()

    def make_trainer(recorder: Recorder) -> DistillationTrainer:
        title = f"{Path(run.model).name} {run.attention}"
        return DistillationTrainer(
            model=distillation,
            args=arguments,
            data_collator=as_is,
            train_dataset=data.train,
            eval_dataset=data.judged[HELD_OUT].some(recipe.dev_examples),
            processing_class=tokenizer,
            callbacks=callbacks_of(out, title, recorder, clock),
            stage_steps=run.stage_steps,
            layers_rate=recipe.layers_rate,
            warmup=recipe.warmup,
        )

    def measure(trainer: DistillationTrainer) -> tuple[float, dict[str, Any]]:
        if not arguments.should_save:
            return 0.0, {}
        if not clock.seconds:  # killed after its last step, so that it does not train any more
            clock.read(trainer.state)
        result = {
            "step": trainer.state.global_step,
            "stages": run.stage_steps,
            **clock.noted(),
            "tokens": trainer.state.num_input_tokens_seen,
            "train_examples": len(data.train),
            "corpora": [Path(name).name for name in options.corpus],
            "parameters": distillation.student.num_parameters(),
            **judge(distillation, data.judged, options.attention_options, run.layers, arguments),
            "sensitivity": [{name: vars(each) for name, each in layer.items()} for layer in sensitivity],
        }
        trainer.card = model_card(config, result, closeness_table(result["parts"]), bool(sentence_modules(run.model)))
        return result["parts"][HELD_OUT]["cosine"], result

    return run_to_end(
        out,
        arguments,
        job=run.job,
        config=config,
        seed=run.seed,
        resume=options.resume,
        save_seconds=options.save_seconds,
        make_trainer=make_trainer,
        measure=measure,
    )
