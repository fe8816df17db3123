"""What a training command is asked for: its recipe and `--set name=value` make Transformers' `TrainingArguments`.

These take many values that fail only later: in Trainer, the optimizer, the loader, the first evaluation. A rehearsal of
two steps with a tiny model goes through all of them before anything is read or written, so that what can't work is
refused like any bad option.
"""

import copy
import os
import tempfile
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch.utils.data import DataLoader
from transformers import HfArgumentParser, TrainingArguments

from nystromformer.checks import did_you_mean
from nystromformer.data.corpus.text import Reading, corpus_files
from nystromformer.training import DEVICES, DTYPES
from nystromformer.training.shared.recipes import Recipe

LARGEST = 10**12
"""No field has a use for larger numbers."""
OURS = {
    "output_dir": "--out",
    "max_steps": "--steps",
    "per_device_train_batch_size": "--batch-size",
    "per_device_eval_batch_size": "--batch-size",
    "seed": "--seed",
    "use_cpu": "--device",
    "bf16": "--dtype",
    "fp16": "--dtype",
}
"""Fields that have an option of their own."""

FIXED = {
    "the task's own metric chooses the model": ("metric_for_best_model", "greater_is_better", "load_best_model_at_end"),
    "the readers say what is a label": ("label_names", "remove_unused_columns", "batch_eval_metrics"),
    "checkpoints are written so that a resumed run is the same to the bit": (
        "data_seed",
        "enable_jit_checkpoint",
        "full_determinism",
        "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
        "resume_from_checkpoint",
        "save_on_each_node",
        "save_only_model",
        "save_strategy",
        "save_total_limit",
    ),
    "the batch size is --batch-size": ("auto_find_batch_size", "train_sampling_strategy"),
    "models are not uploaded; push the finished folder with huggingface_hub": (
        "push_to_hub",
        "hub_always_push",
        "hub_model_id",
        "hub_private_repo",
        "hub_revision",
        "hub_strategy",
        "hub_token",
    ),
}
"""Why some fields can't be set."""


_REHEARSED: set[str] = set()
"""Settings that were tried already."""

REHEARSED_METRIC = "rehearsed"

MOST_WORKERS = 1_024
"""Of a loader."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What every training command is asked for: its options by their names. Each command checks its own when made."""

    preset: str
    out: Path
    seed: int
    resume: bool
    save_seconds: float
    """Between checkpoints, at most."""
    device: str
    dtype: str
    settings: list[str] | None
    changes: dict[str, Any]
    """Options that are named like a field of the recipe, and given: what they change there."""

    @classmethod
    def given(cls, **options: Any) -> Self:
        """From all options of a command. What is no field here is one of the recipe's."""
        own = {field.name for field in fields(cls)}
        return cls(
            **{name: value for name, value in options.items() if name in own},
            changes={name: value for name, value in options.items() if name not in own and value is not None},
        )

    @cached_property
    def parsed_settings(self) -> dict[str, Any]:
        return parse_settings(self.settings or [])


@dataclass(frozen=True, kw_only=True)
class CorpusOptions(TrainingOptions):
    """What commands that train on plain text are asked for."""

    corpus: list[str]
    text_column: str
    documents: str

    @cached_property
    def reading(self) -> Reading:
        return Reading(text_column=self.text_column, division=self.documents)

    @cached_property
    def files(self) -> list[Path]:
        return corpus_files(tuple(self.corpus))


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: everything that decides what comes out, but for the data."""

    job: ClassVar[str]
    preset: str
    attention: str
    seed: int
    recipe: Recipe
    settings: dict[str, Any]
    """Fields of `TrainingArguments` that the user has set."""
    dtype: str

    def config(self) -> dict[str, Any]:
        """As it is noted in the folder and in each record."""
        own = {name: value for name, value in vars(self).items() if name != "recipe"}
        return own | self.recipe.noted() | {"processes": processes()}

    def training_arguments(self, out: Path, device: str, recipe_fields: dict[str, Any]) -> TrainingArguments:
        return training_arguments(
            out,
            batch_size=self.recipe.batch_size,
            seed=self.seed,
            device=device,
            dtype=self.dtype,
            defaults=recipe_fields,
            settings=self.settings,
        )


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Values for fields of `TrainingArguments`, each in the type of its field.

    >>> parse_settings(["learning_rate=3e-4", "logging_first_step=true"])
    {'learning_rate': 0.0003, 'logging_first_step': True}
    >>> parse_settings(["learning_rat=3e-4"])
    Traceback (most recent call last):
    ValueError: --set learning_rat=3e-4: must be name=value for a field of TrainingArguments. Did you mean ...
    """
    known = [field.name for field in fields(TrainingArguments) if field.init]
    parser = HfArgumentParser(TrainingArguments)
    parsed: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in known:
            raise ValueError(
                f"--set {setting}: must be name=value for a field of TrainingArguments.{did_you_mean(name, known)}"
            )
        if name in OURS:
            raise ValueError(f"--set {setting}: use {OURS[name]} instead.")
        for reason, names in FIXED.items():
            if name in names:
                raise ValueError(f"--set {setting}: {name} is fixed, since {reason}; leave it out.")

        def refuse(message: str, setting: str = setting) -> None:
            raise ValueError(f"--set {setting}: {message}.")

        parser.error = refuse
        parsed[name] = getattr(parser.parse_args([f"--{name}={value}"]), name)
        if isinstance(parsed[name], (int, float)) and not abs(parsed[name]) <= LARGEST:
            raise ValueError(f"--set {setting}: must be a number of at most {LARGEST:,}.")
    return parsed


def check_device(device: str) -> None:
    if device not in DEVICES:
        raise ValueError(f"--device {device}: must be one of {', '.join(DEVICES)}; CUDA_VISIBLE_DEVICES picks a GPU.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here; use --device cpu.")


def on_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def processes() -> int:
    """How many `torchrun` has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def training_arguments(
    out: Path,
    *,
    batch_size: int,
    seed: int,
    device: str,
    dtype: str,
    defaults: dict[str, Any],
    settings: dict[str, Any],
) -> TrainingArguments:
    """`defaults` are the job's, `settings` the user's. `batch_size` is that of a step, over all processes."""
    check_device(device)
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}.")
    if dtype == "float16" and on_cpu(device):
        raise ValueError("--dtype float16: needs a GPU, since gradients are scaled there; use bfloat16 or float32.")
    accumulation = int((defaults | settings).get("gradient_accumulation_steps", 1))
    if accumulation < 1:
        raise ValueError(f"--set gradient_accumulation_steps={accumulation}: must be at least 1.")
    shares = processes() * accumulation
    if batch_size < 1 or batch_size % shares:
        raise ValueError(
            f"--batch-size {batch_size}: must be at least 1 and divisible by {processes()} processes × {accumulation} "
            f"accumulation steps."
        )
    arguments = {
        "output_dir": str(out),
        "per_device_train_batch_size": batch_size // shares,
        "per_device_eval_batch_size": batch_size // shares,
        "seed": seed,
        "data_seed": seed,
        "use_cpu": on_cpu(device),
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "report_to": "none",  # TensorBoard gets a callback that knows where a resumed run starts
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": not on_cpu(device),
        "ddp_find_unused_parameters": False,
        "log_level": "error",
        **defaults,
        **settings,
    }
    try:
        made = TrainingArguments(**arguments)
    except Exception as error:  # as many kinds as there are fields
        given = "".join(f" --set {name}={value}" for name, value in settings.items())
        raise ValueError(f"{given.strip() or 'TrainingArguments'}: {error}") from error
    made._n_gpu = min(made.n_gpu, 1)  # several GPUs are used through torchrun, never by DataParallel
    if settings and (tried := f"{sorted(settings.items())} {device} {dtype}") not in _REHEARSED:
        rehearse(made, settings)
        _REHEARSED.add(tried)
    return made


def rehearse(arguments: TrainingArguments, settings: dict[str, Any]) -> None:
    """Raise `ValueError` for settings with which no run would come to its end."""
    named = ", ".join(f"{name}={value}" for name, value in settings.items())
    try:
        _check_parts(arguments)
        if not (arguments.fsdp or arguments.deepspeed):  # which need the processes and the model of the run
            _train_two_steps(arguments)
    except Exception as error:  # as many kinds as there are fields
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"--set {named}: does not work ({reason[:300]}); change or leave it out.") from error


def _check_parts(arguments: TrainingArguments) -> None:
    """What a rehearsal would start or install, looked at instead."""
    from transformers.integrations import get_available_reporting_integrations  # here and below: only for settings

    available = get_available_reporting_integrations()
    missing = [name for name in arguments.report_to if name not in available]
    if missing:
        raise ValueError(
            f"report_to: {', '.join(missing)} is not installed, but {', '.join(available) or 'nothing'} is"
        )
    if arguments.torch_compile_backend:
        backends = torch.compiler.list_backends(exclude_tags=())
        if arguments.torch_compile_backend not in backends:
            raise ValueError(f"torch_compile_backend: must be one of {', '.join(backends)}")
    if not 0 <= arguments.dataloader_num_workers <= MOST_WORKERS:
        raise ValueError(f"dataloader_num_workers: must be from 0 to {MOST_WORKERS:,}")
    one_example: Any = [0]
    DataLoader(
        one_example,
        num_workers=arguments.dataloader_num_workers,
        prefetch_factor=arguments.dataloader_prefetch_factor,
        persistent_workers=arguments.dataloader_persistent_workers,
    )


def _train_two_steps(arguments: TrainingArguments) -> None:
    from transformers import Trainer, default_data_collator
    from transformers.trainer_callback import PrinterCallback

    from nystromformer.models.lra import NystromformerForLongRangeArena, lra_config

    example = {"input_ids": torch.tensor([1, 2, 3, 4]), "labels": torch.tensor(1)}
    examples = [example] * 4
    config = lra_config(attention="standard", vocab_size=8, max_position_embeddings=8, num_labels=2)
    tried = copy.copy(arguments)
    tried.max_steps, tried.num_train_epochs = 2, 1
    tried.per_device_train_batch_size = tried.per_device_eval_batch_size = 1
    tried.eval_strategy = tried.logging_strategy = "steps"
    tried.eval_steps = tried.logging_steps = 1
    tried.eval_delay, tried.save_strategy = 0, "no"
    tried.metric_for_best_model, tried.load_best_model_at_end = REHEARSED_METRIC, False
    tried.report_to, tried.torch_compile, tried.torch_compile_backend = [], False, None
    tried.dataloader_num_workers, tried.dataloader_prefetch_factor = 0, None
    tried.dataloader_persistent_workers = False
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        tried.output_dir = folder
        trainer = Trainer(
            model=NystromformerForLongRangeArena(config),
            args=tried,
            data_collator=default_data_collator,
            train_dataset=examples,
            eval_dataset=examples,
            compute_metrics=lambda prediction: {REHEARSED_METRIC: float(len(prediction.label_ids))},
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if not any(f"eval_{REHEARSED_METRIC}" in entry for entry in trainer.state.log_history):
        raise ValueError("evaluations give no metric with it, and the best model could not be told")
