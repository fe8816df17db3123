"""A small training run that can be killed."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import torch.distributed as dist
from transformers import TrainerCallback, TrainingArguments, set_seed

from nystromformer.data.lra import as_is
from nystromformer.data.lra.examples import Examples, Sequences
from nystromformer.models.lra import NystromformerForLongRangeArena, lra_config
from nystromformer.training.run import train
from nystromformer.training.shared.callbacks import metric_function
from nystromformer.training.trainer import ExactTrainer


def examples(count: int, seed: int) -> Examples:
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 20, rng.integers(5, 60)).astype(np.uint8).tobytes() for _ in range(count)]
    return Examples((Sequences.of(texts),), rng.integers(0, 3, count))


TRAIN, DEV = examples(70, 0), examples(11, 1)


class Killed(BaseException):
    """Like a signal, which no part of the program takes for a fault of its own."""


class KillAt(TrainerCallback):
    """Stops the run like a signal, after some step, wherever its last checkpoint is."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise Killed


def make_trainer(
    out: Path,
    kill_at: int | None = None,
    attention: str = "nystrom-4",
    packed: int | None = None,
    **settings: object,
) -> ExactTrainer:
    set_seed(5)
    model = NystromformerForLongRangeArena(
        lra_config(attention=attention, vocab_size=32, max_position_embeddings=64, num_labels=3)
    )
    defaults = {
        "max_steps": 16,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "learning_rate": 1e-3,
        "warmup_steps": 4,
        "per_device_train_batch_size": 8 if packed is None else 1,
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "use_cpu": True,
        "seed": 5,
        "data_seed": 5,
        "dataloader_pin_memory": False,
    }
    return ExactTrainer(
        model=model,
        args=TrainingArguments(str(out), **defaults | settings),
        data_collator=as_is,
        train_dataset=TRAIN,
        eval_dataset=DEV,
        compute_metrics=metric_function(("accuracy",)),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
        callbacks=[KillAt(kill_at)],
        packed=packed,
    )


def whole_and_killed(folder: str) -> None:
    """On two processes: a whole run, and one that is killed and resumed."""
    out, settings = Path(folder), {"per_device_train_batch_size": 4}  # 9 steps per epoch, as with one process
    train(make_trainer(out / "whole", **settings))
    with suppress(Killed):
        train(make_trainer(out / "killed", kill_at=13, **settings))
    train(make_trainer(out / "killed", **settings))
    dist.destroy_process_group()
