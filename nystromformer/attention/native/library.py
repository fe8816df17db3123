"""The one place that knows whether machine code of our own runs, for which instructions, and why not.

It is built from the C sources beside this file when the package is installed, where a compiler is present. Without it,
or with NYSTROMFORMER_NATIVE=0 in the environment, PyTorch's operations compute the same.
"""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

SWITCH = "NYSTROMFORMER_NATIVE"
SETS = {"AVX512": "avx512", "AVX2": "avx2"}
"""The functions for what PyTorch says it uses of this processor, so that ATEN_CPU_CAPABILITY holds for both."""
NAMES = {torch.float32: "float", torch.float64: "double"}


class Off(Exception):
    """Says why there is no machine code."""


def _load() -> ctypes.CDLL:
    if os.environ.get(SWITCH, "1") == "0":
        raise Off(f"{SWITCH}=0 in the environment")
    found = [path for suffix in EXTENSION_SUFFIXES if (path := Path(__file__).with_name(f"_kernels{suffix}")).exists()]
    if not found:
        raise Off("the package was installed without a C compiler")
    try:
        # torch's threads: the entry of the OpenMP runtime that it has loaded for all
        threads = ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except AttributeError:
        raise Off("this build of torch has no OpenMP threads to share") from None
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        raise Off(f"{found[0].name} can't be loaded: {error}") from None
    library.nystrom_set_parallel_region(threads)
    # Only the thread that forks exists in the child: a region of several would wait for the others forever.
    os.register_at_fork(after_in_child=lambda: library.nystrom_set_parallel_region(None))
    return library


_PAGE, _LARGE, _HUGE = 2 << 20, 32 << 20, 14  # bytes of a large page, and of what is large; MADV_HUGEPAGE
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None

_library: ctypes.CDLL | None
try:
    _library, _reason = _load(), ""
except Off as off:
    _library, _reason = None, str(off)
_set: str | None = None if _library is None else SETS.get(torch.backends.cpu.get_cpu_capability(), "baseline")


def instructions() -> str:
    """The vector instructions of the machine code that runs on CPUs, or "none" and why.

    >>> instructions().split(":")[0] in ("avx512", "avx2", "baseline", "none")
    True
    """
    return _set or f"none: {_reason}"


def runs_native(*tensors: Tensor) -> bool:
    """Whether machine code can compute with these tensors: float32 or float64 on a CPU, with nothing that traces them.

    An exported graph must run elsewhere; under `torch.func` tensors are not what they seem.
    """
    if _set is None or torch.compiler.is_exporting():
        return False
    dtype = tensors[0].dtype
    if dtype not in NAMES or any(x.device.type != "cpu" or x.dtype != dtype for x in tensors):
        return False
    if torch.compiler.is_compiling():
        return True
    return all(type(x) in (Tensor, Parameter) for x in tensors) and not torch._C._are_functorch_transforms_active()


@contextmanager
def without_native() -> Iterator[None]:
    """PyTorch's operations alone, which stand for those of a GPU.

    >>> with without_native():
    ...     print(instructions())
    none: switched off
    """
    global _set, _reason
    before = _set, _reason
    _set, _reason = None, "switched off"
    try:
        yield
    finally:
        _set, _reason = before


def large_pages(x: Tensor) -> Tensor:
    """`x`, new memory that nothing is written to yet. Where it is large, the system is asked for large pages.

    It then comes 2 MB at a time and not 4 kB, and rows that lie far apart need fewer entries of the processor's tables.
    Less than 32 MB malloc keeps for later use, and need not come again.
    """
    size = x.numel() * x.element_size()
    if size >= _LARGE and _madvise is not None and type(x) is Tensor and x.device.type == "cpu":
        begin = -(-x.data_ptr() // _PAGE) * _PAGE
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t((x.data_ptr() + size) // _PAGE * _PAGE - begin), _HUGE)
    return x


def call(name: str, dtype: torch.dtype, scale: float, *arguments: int) -> None:
    """Run one function of the library. Its C source says which numbers it takes."""
    function = getattr(_library, f"{name}_{NAMES[dtype]}_{_set}")
    numbers = (ctypes.c_int64 * (len(arguments) + 1))(torch.get_num_threads(), *arguments)
    if function(numbers, ctypes.c_double(scale)) != 0:
        raise MemoryError(f"{name}: no memory for what its threads need besides their tensors.")
