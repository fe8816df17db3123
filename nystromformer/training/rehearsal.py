"""The user's settings tried on a tiny model before anything is read or written.

`TrainingArguments` takes many values that fail only later: in Trainer, the optimizer, the loader, the first evaluation.
A rehearsal of two steps goes through all of them in a moment, so that what can't work is refused like any bad option.
"""

import copy
import tempfile
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, default_data_collator
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_callback import PrinterCallback

from nystromformer.models.lra import NystromformerForLongRangeArena, lra_config

METRIC = "rehearsed"
MOST_WORKERS = 1_024


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
    example = {"input_ids": torch.tensor([1, 2, 3, 4]), "labels": torch.tensor(1)}
    examples = [example] * 4
    config = lra_config(attention="standard", vocab_size=8, max_position_embeddings=8, num_labels=2)
    tried = copy.copy(arguments)
    tried.max_steps, tried.num_train_epochs = 2, 1
    tried.per_device_train_batch_size = tried.per_device_eval_batch_size = 1
    tried.eval_strategy = tried.logging_strategy = "steps"
    tried.eval_steps = tried.logging_steps = 1
    tried.eval_delay, tried.save_strategy = 0, "no"
    tried.metric_for_best_model, tried.load_best_model_at_end = METRIC, False
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
            compute_metrics=lambda prediction: {METRIC: float(len(prediction.label_ids))},
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if not any(f"eval_{METRIC}" in entry for entry in trainer.state.log_history):
        raise ValueError("evaluations give no metric with it, and the best model could not be told")
