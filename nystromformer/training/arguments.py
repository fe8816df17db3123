"""`TrainingArguments` from a job's own settings and the user's `--set name=value`."""

import os
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path

import torch
from transformers import HfArgumentParser, TrainingArguments

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
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


def parse_settings(settings: list[str]) -> dict[str, object]:
    """Values for fields of `TrainingArguments`, each in the type of its field.

    >>> parse_settings(["learning_rate=3e-4", "logging_first_step=true"])
    {'learning_rate': 0.0003, 'logging_first_step': True}
    >>> parse_settings(["learning_rat=3e-4"])
    Traceback (most recent call last):
    ValueError: --set learning_rat=3e-4: must be name=value for a field of TrainingArguments. Did you mean ...
    """
    known = [field.name for field in fields(TrainingArguments) if field.init]
    parser = HfArgumentParser(TrainingArguments)
    parsed: dict[str, object] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"--set {setting}: must be name=value for a field of TrainingArguments.{hint}")
        if name in OURS:
            raise ValueError(f"--set {setting}: use {OURS[name]} instead.")

        def refuse(message: str, setting: str = setting) -> None:
            raise ValueError(f"--set {setting}: {message}.")

        parser.error = refuse
        parsed[name] = getattr(parser.parse_args([f"--{name}={value}"]), name)
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
    defaults: dict[str, object],
    settings: dict[str, object],
) -> TrainingArguments:
    """`defaults` are the job's, `settings` the user's. `batch_size` is that of a step, over all processes."""
    check_device(device)
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}.")
    if dtype == "float16" and on_cpu(device):
        raise ValueError("--dtype float16: needs a GPU, since gradients are scaled there; use bfloat16 or float32.")
    accumulation = int(settings.get("gradient_accumulation_steps", 1))
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
        "report_to": "none",  # TensorBoard gets a callback that knows where a resumed run goes on
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": not on_cpu(device),
        "ddp_find_unused_parameters": False,
        "log_level": "error",
        **defaults,
        **settings,
    }
    made = TrainingArguments(**arguments)
    made._n_gpu = min(made.n_gpu, 1)  # several GPUs are used through torchrun, never by DataParallel
    return made
