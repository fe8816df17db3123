"""Single files of public packages, which tests read as oracles or as clients. None of them is a dependency."""

import os
import sys
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

FILES = {
    "NYSTROMFORMER_XFORMERS": ("xformers==0.0.28.post3", "xformers/components/attention/nystrom.py"),
    "NYSTROMFORMER_SLIDEFLOW": ("slideflow", "slideflow/mil/models/transmil.py"),
    "NYSTROMFORMER_TORCHMIL": ("torchmil", "torchmil/nn/attention/nystrom_attention.py"),
    "NYSTROMFORMER_VIT_PYTORCH": ("vit-pytorch", "vit_pytorch/efficient.py"),
}
"""The distribution that holds each file, by the environment variable that names it."""


def public_file(variable: str) -> Path:
    distribution, path = FILES[variable]
    if variable not in os.environ:
        pytest.skip(f"{variable} is not set: pip download --no-deps {distribution}, unpack, and name its {path}")
    return Path(os.environ[variable])


def load(path: Path, name: str) -> ModuleType:
    """The file as a module of that name, entered in `sys.modules` while it runs only."""
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    with modules({name: module}):
        spec.loader.exec_module(module)
    return module


@contextmanager
def modules(stand_ins: dict[str, ModuleType]):
    """`sys.modules` with these, and as before afterwards."""
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def stand_in(name: str, **contents: object) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []
    module.__dict__.update(contents)
    return module
