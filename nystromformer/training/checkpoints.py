"""Checkpoints in a run's folder: `checkpoint-STEP`, each whole or absent."""

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import torch

from nystromformer.training.state import load_state, save_state

NAME = re.compile(r"checkpoint-(\d+)")
UNFINISHED = ".checkpoint-"
"""Names of checkpoints that are being written start so; they are renamed when whole."""
TRAINER_STATE = "trainer_state.json"


def checkpoint_folder(out: Path, step: int) -> Path:
    return out / f"checkpoint-{step}"


def unfinished_folder(out: Path, step: int) -> Path:
    return out / f"{UNFINISHED}{step}"


def steps_saved(out: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    found = [NAME.fullmatch(path.name) for path in out.glob("checkpoint-*")]
    return sorted(int(match[1]) for match in found if match)


def last_checkpoint(out: Path) -> Path | None:
    steps = steps_saved(out)
    return checkpoint_folder(out, steps[-1]) if steps else None


def keep_only(out: Path, steps: set[int]) -> None:
    """Remove all other checkpoints."""
    for step in steps_saved(out):
        if step not in steps:
            shutil.rmtree(checkpoint_folder(out, step))


def remove_unfinished(out: Path) -> None:
    for path in out.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path)


def trainer_state(checkpoint: Path) -> dict[str, object]:
    return json.loads((checkpoint / TRAINER_STATE).read_text(encoding="utf-8"))


def save_generators(path: Path) -> None:
    """The states of all random generators of this process."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    save_state(path, state)


def load_generators(path: Path) -> None:
    state = load_state(path)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
