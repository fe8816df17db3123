"""Checkpoints in a run's folder: `checkpoint-STEP`, each whole or absent, safetensors and JSON without pickle.

A checkpoint carries checksums of its files. One that is not what was written, or whose best model is lost, is passed
over: a run resumes from the last good one.
"""

import json
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nystromformer.files import damage_of, read_object, remove

NAME = re.compile(r"checkpoint-(\d+)")

TRAINER_STATE = "trainer_state.json"

STRUCTURE = "structure"
"""What the metadata of a state's file call everything that is no tensor."""


def checkpoint_folder(out: Path, step: int) -> Path:
    return out / f"checkpoint-{step}"


def steps_saved(out: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    found = [NAME.fullmatch(path.name) for path in out.glob("checkpoint-*")]
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
