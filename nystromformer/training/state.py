"""Any training state in one safetensors file, without pickle: tensors as tensors, the rest as JSON in the header.

Optimizers, schedulers, gradient scalers and random generators keep dicts, lists, tuples, numbers, strings and arrays.
All come back as they were, integer keys and tuples included.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

STRUCTURE = "structure"


def save_state(path: Path, state: object) -> None:
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_packed(state, tensors))
    save_file(tensors, path, metadata={STRUCTURE: structure})


def load_state(path: Path) -> object:
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


def _unpacked(value: object, tensors: dict[str, Tensor]) -> object:
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
