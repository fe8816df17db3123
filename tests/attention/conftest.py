"""The fixture `instructions`: machine code of every set of vector instructions that this processor has, and none."""

import pytest
import torch

from nystromformer.attention import native
from nystromformer.attention.native import library


@pytest.fixture(params=["avx512", "avx2", "baseline", "none"])
def instructions(request, monkeypatch):
    """None is PyTorch's operations."""
    has = torch.backends.cpu.get_cpu_capability()
    fewer = {"AVX512": ("avx512", "avx2", "baseline"), "AVX2": ("avx2", "baseline")}.get(has, ("baseline",))
    if request.param == "none":
        monkeypatch.setattr(library, "_set", None)
    elif request.param not in fewer or native.instructions().startswith("none"):
        pytest.skip(f"this processor has {has}; machine code: {native.instructions()}")
    else:
        monkeypatch.setattr(library, "_set", request.param)
