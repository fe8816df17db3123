"""One run in one folder: started once, resumed where it stopped, finished once."""

import json
import os
import shutil
from pathlib import Path

from safetensors.torch import load_model
from transformers import TrainerState

from nystromformer.records import CONFIG, RECORDS, write_config
from nystromformer.training.checkpoints import (
    TRAINER_STATE,
    checkpoint_folder,
    keep_only,
    last_checkpoint,
    remove_unfinished,
    steps_saved,
    trainer_state,
)
from nystromformer.training.trainer import ExactTrainer

MODEL = "model"
"""The subfolder with the model of a finished run."""


def check_folder(out: Path, config: dict[str, object], resume: bool) -> None:
    """Raise `ValueError` for a folder that holds a run which is not to be resumed, or another one."""
    path = out / CONFIG
    if not resume and (path.exists() or (out / RECORDS).exists() or steps_saved(out)):
        raise ValueError(f"{out} holds a run already: go on with --resume, or give another --out.")
    if not path.exists():
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(config))
    for name in now:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"--resume with {name}={now.get(name)!r}: {path} says {before.get(name)!r}; a resumed run must keep "
                f"its settings. Give the same, or another --out."
            )


def prepare_folder(out: Path, config: dict[str, object], resume: bool) -> None:
    """Check the folder and note the configuration of the run in it."""
    check_folder(out, config, resume)
    remove_unfinished(out)
    if not (out / CONFIG).exists():
        write_config(out, config)


def train(trainer: ExactTrainer) -> None:
    """Train from the last checkpoint of the run's folder to the end.

    The model is then the best one on the dev set or, where the run names no metric for that, the last one.
    """
    out = Path(trainer.args.output_dir)
    checkpoint = last_checkpoint(out)
    if checkpoint is not None and trainer_state(checkpoint)["global_step"] >= trainer.args.max_steps:
        # Killed after the last step. Trainer would take one step more.
        trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        if trainer.state.best_global_step and trainer.args.load_best_model_at_end:
            checkpoint = checkpoint_folder(out, trainer.state.best_global_step)
        load_model(trainer.model, checkpoint / "model.safetensors")
        return
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))


def finish(trainer: ExactTrainer) -> None:
    """Keep the model as `out/model`, whole or absent; checkpoints are no longer needed."""
    out = Path(trainer.args.output_dir)
    if trainer.args.should_save:
        aside = out / f".{MODEL}"
        shutil.rmtree(aside, ignore_errors=True)
        trainer._save(str(aside))
        shutil.rmtree(out / MODEL, ignore_errors=True)
        os.replace(aside, out / MODEL)
        keep_only(out, set())
    trainer.accelerator.wait_for_everyone()
