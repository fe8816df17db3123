"""The whole life of a training run and its checkpoints, the same for every job.

A run has its folder for itself: no other process writes there while it lives. It resumes from the last good checkpoint,
and nothing is removed before what it serves is on the disk: the model is kept, then the result recorded, and only then
the checkpoints go. So wherever it is killed, resuming gives the same model and the same records.

A checkpoint is the folder `checkpoint-STEP`, whole or absent: safetensors and JSON without pickle, with checksums of
its files. One that is not what was written, or whose best model is lost, is passed over.
"""

import json
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_file
from torch import Tensor
from transformers import Trainer, TrainerState, TrainingArguments

from nystromformer.errors import user_input
from nystromformer.files import damage_of, locked, read_object, remove, sweep, whole_folder
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
from nystromformer.training.shared.interrupts import interrupts, shortage_told

MODEL = "model"
"""The subfolder with the model of a finished run."""

CHECKPOINT = re.compile(r"checkpoint-(\d+)")

TRAINER_STATE = "trainer_state.json"

STRUCTURE = "structure"
"""What the metadata of a state's file call everything that is no tensor."""


def run_to_end(
    out: Path,
    arguments: TrainingArguments,
    *,
    job: str,
    config: dict[str, Any],
    seed: int,
    resume: bool,
    save_seconds: float,
    make_trainer: Callable[[Recorder], Trainer],
    measure: Callable[[Trainer], tuple[float, dict[str, Any]]],
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


def train(trainer: Trainer) -> None:
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


def keep_model(trainer: Trainer) -> None:
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


def checkpoint_folder(out: Path, step: int) -> Path:
    return out / f"checkpoint-{step}"


def steps_saved(out: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    found = [CHECKPOINT.fullmatch(path.name) for path in out.glob("checkpoint-*")]
    return sorted(int(match[1]) for match in found if match)


def last_checkpoint(out: Path) -> Path | None:
    """The last good checkpoint. Others are passed over with a warning."""
    for step in reversed(steps_saved(out)):
        folder = checkpoint_folder(out, step)
        if (damage := damage_of_checkpoint(folder)) is None:
            return folder
        warnings.warn(f"{folder} is damaged ({damage}): resuming from the one before, if there is any.", stacklevel=2)
    return None


def damage_of_checkpoint(checkpoint: Path) -> str | None:
    """Why a run can't resume from a checkpoint; None for a good one.

    Without the best model so far, which is a checkpoint of its own, a run would end with another one.
    """
    if (damage := damage_of(checkpoint)) is not None:
        return damage
    try:
        best = trainer_state(checkpoint).get("best_global_step")
    except (OSError, ValueError) as error:
        return str(error)
    if best is None or checkpoint_folder(checkpoint.parent, best) == checkpoint:
        return None
    damage = damage_of(checkpoint_folder(checkpoint.parent, best))
    return damage and f"the best model so far, that of step {best}, is lost: {damage}"


def trainer_state(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / TRAINER_STATE
    state = read_object(path)
    if not isinstance(state.get("global_step"), int):
        raise ValueError(f"{path}: names no global_step.")
    return state


def keep_only(out: Path, steps: set[int | None]) -> None:
    """Remove all other checkpoints."""
    for step in steps_saved(out):
        if step not in steps:
            remove(checkpoint_folder(out, step))


def save_state(path: Path, state: object) -> None:
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_packed(state, tensors))
    save_file(tensors, path, metadata={STRUCTURE: structure})


def load_state(path: Path) -> Any:
    """What `save_state` was given, with all tensors on the CPU.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> save_state(path, {"state": {0: {"step": torch.tensor(3.0)}}, "betas": (0.9, 0.999)})
    >>> load_state(path)
    {'state': {0: {'step': tensor(3.)}}, 'betas': (0.9, 0.999)}
    """
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _unpacked(json.loads(file.metadata()[STRUCTURE]), tensors)


def generators_state() -> dict[str, Any]:
    """The states of all random generators of this process."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_generators(state: dict[str, Any]) -> None:
    """Let all random generators continue from what `generators_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def _packed(value: object, tensors: dict[str, Tensor]) -> object:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # Tensors that share memory can't be stored; a copy of each can.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, np.ndarray):
        return {"array": _packed(torch.from_numpy(value.copy()), tensors)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {"dict": [[_packed(key, tensors), _packed(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_packed(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__} in a training state: only plain values, arrays and tensors are stored.")


def _unpacked(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "array":
        return _unpacked(inner, tensors).numpy()
    if kind == "dict":
        return {_unpacked(key, tensors): _unpacked(item, tensors) for key, item in inner}
    items = [_unpacked(item, tensors) for item in inner]
    return tuple(items) if kind == "tuple" else items
