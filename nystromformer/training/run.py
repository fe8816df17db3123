"""The whole life of a training run, the same for every job.

A run has its folder for itself: no other process writes there while it lives. It resumes from the last good checkpoint,
and nothing is removed before what it serves is on the disk: the model is kept, then the result recorded, and only then
the checkpoints go. So wherever it is killed, resuming gives the same model and the same records.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_model
from transformers import TrainerState, TrainingArguments

from nystromformer.errors import user_input
from nystromformer.files import damage_of, locked, remove, sweep, whole_folder
from nystromformer.records import (
    CONFIG,
    RECORDS,
    RESULTS,
    Recorder,
    drop_records,
    read_config,
    result_in,
    write_config,
)
from nystromformer.training.checkpoints import (
    TRAINER_STATE,
    checkpoint_folder,
    keep_only,
    last_checkpoint,
    steps_saved,
    trainer_state,
)
from nystromformer.training.interrupts import interrupts
from nystromformer.training.shortages import shortage_told
from nystromformer.training.trainer import ExactTrainer

MODEL = "model"
"""The subfolder with the model of a finished run."""


def run_to_end(
    out: Path,
    arguments: TrainingArguments,
    *,
    job: str,
    config: dict[str, Any],
    seed: int,
    resume: bool,
    save_seconds: float,
    make_trainer: Callable[[Recorder], ExactTrainer],
    measure: Callable[[ExactTrainer], tuple[float, dict[str, Any]]],
) -> dict[str, Any]:
    """Train, measure, keep the model and record the result, from wherever an earlier process got to. Returns the last.

    `measure` gives the result and what its record says besides. Raises `UserError` for a folder that holds another run
    or is being written, and where disk or memory do not suffice; `Stopped` after a signal.
    """
    with ExitStack() as stack:
        with user_input(), arguments.main_process_first():  # the others find the folder as it shall be
            if arguments.should_save:
                stack.enter_context(_own(out))
            check_folder(out, config, resume or not arguments.should_save)
            done = finished(out)
        if done is not None:
            return done
        stack.enter_context(shortage_told())
        if arguments.should_save:
            sweep(out)
        recorder = Recorder(out, job=job, config=config, seed=seed)
        trainer = make_trainer(recorder)
        if arguments.should_save:
            write_config(out, config)
        with interrupts(save_seconds) as caught:
            trainer.add_callback(caught)
            try:
                train(trainer)
                value, details = measure(trainer)
            finally:
                trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            trainer.accelerator.wait_for_everyone()
            if arguments.should_save:
                keep_model(trainer)
                recorder.record(RESULTS[job], value, **details)
                keep_only(out, set())
            trainer.accelerator.wait_for_everyone()
            if caught.signal:
                caught.stop("after the run was finished")
    result = result_in(out)
    assert result is not None, f"{out}: the record that was just written is gone"
    return result


def check_folder(out: Path, config: dict[str, Any], resume: bool) -> None:
    """Raise `ValueError` for a folder that holds a run which is not to be resumed, or another one."""
    before = read_config(out)
    if not resume and (before is not None or (out / RECORDS).exists() or steps_saved(out)):
        raise ValueError(f"{out} holds a run already: resume it with --resume, or give another --out.")
    if before is None:
        return
    now = json.loads(json.dumps(config))
    for name in now:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"--resume with {name}={now.get(name)!r}: {out / CONFIG} says {before.get(name)!r}; a resumed run must "
                f"keep its settings. Give the same, or another --out."
            )


def finished(out: Path) -> dict[str, Any] | None:
    """The result of the run in a folder; None for one that is not finished or has lost its model.

    What a kill after the end left over is removed.
    """
    done = result_in(out)
    if done is None:
        return None
    if (damage := damage_of(out / MODEL)) is not None:
        warnings.warn(f"{out / MODEL} is damaged ({damage}): the run is not finished any more.", stacklevel=2)
        return None
    if os.environ.get("RANK", "0") == "0":
        keep_only(out, set())
        sweep(out)
    return done


def train(trainer: ExactTrainer) -> None:
    """Train from the last good checkpoint of the run's folder to the end.

    The model is then the best one on the dev set or, where the run names no metric for that, the last one.
    """
    out = Path(trainer.args.output_dir)
    checkpoint = last_checkpoint(out)
    step = 0 if checkpoint is None else trainer_state(checkpoint)["global_step"]
    if trainer.args.should_save:
        drop_records(out, after=step)
    if checkpoint is None or step < trainer.args.max_steps:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return
    # Killed after the last step. Trainer would take one step more.
    trainer.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
    if trainer.state.best_global_step and trainer.args.load_best_model_at_end:
        checkpoint = checkpoint_folder(out, trainer.state.best_global_step)
    load_model(trainer.model, checkpoint / "model.safetensors")


def keep_model(trainer: ExactTrainer) -> None:
    """The model as `out/model`, with checksums."""
    with whole_folder(Path(trainer.args.output_dir) / MODEL, replace=True, checksums=True) as folder:
        trainer._save(str(folder))


@contextmanager
def _own(out: Path) -> Iterator[None]:
    """Keep other processes out of a run's folder. A run that fails before anything is trained leaves nothing there."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    with locked(out):
        found = set() if out in made else set(out.iterdir())
        try:
            yield
        except BaseException:
            with suppress(OSError):  # of a disk that is gone; the error that ends the run is told
                if not (out / RECORDS).exists() and not steps_saved(out):
                    for path in set(out.iterdir()) - found:
                        remove(path)
            for folder in made:
                with suppress(OSError):  # it holds something
                    folder.rmdir()
            raise
