"""The fixtures `machine_code`, of every set of vector instructions that this processor has, and `instructions`, which
is PyTorch's operations, too."""

import pytest
import torch

from nystromformer.attention import native
from nystromformer.attention.native import library

SETS = ("avx512", "avx2", "baseline")


@pytest.fixture(params=SETS)
def machine_code(request, monkeypatch):
    use_set(request.param, monkeypatch)


@pytest.fixture(params=[*SETS, "none"])
def instructions(request, monkeypatch):
    """None is PyTorch's operations."""
    use_set(request.param, monkeypatch)


def use_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has = torch.backends.cpu.get_cpu_capability()
    fewer = {"AVX512": SETS, "AVX2": SETS[1:]}.get(has, SETS[2:])
    if name != "none" and (name not in fewer or native.instructions().startswith("none")):
        pytest.skip(f"this processor has {has}; machine code: {native.instructions()}")
    monkeypatch.setattr(library, "_set", None if name == "none" else name)
