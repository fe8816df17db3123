"""The kernels that an operation dispatches, each of which is a launch on a GPU, and those that would wait for one."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense.default,
    aten._unique2.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.unique_dim.default,
}
"""Operations whose result a host must wait for: numbers in Python, and shapes that depend on data."""

NOTHING_LAUNCHED = {
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.lift_fresh.default,
    aten.new_empty.default,
}
"""Views by another name, and memory without content."""


class Kernels(TorchDispatchMode):
    """Lists what is dispatched and makes a tensor, without views and without memory that nothing is written to yet.

    >>> with Kernels() as kernels:
    ...     _ = (torch.ones(2, 3).T + 1).sum()
    >>> kernels.names
    ['aten.ones.default', 'aten.add.Tensor', 'aten.sum.default']
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.waiting: list[str] = []

    @property
    def count(self) -> int:
        return len(self.names)

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        if operation in WAITING:
            self.waiting.append(str(operation))
        makes_tensor = any(isinstance(x, torch.Tensor) for x in tree_leaves(out))
        if makes_tensor and not operation.is_view and operation not in NOTHING_LAUNCHED:
            self.names.append(str(operation))
        return out
