"""What tests of launches watch: the kernels that are dispatched, and those that would wait for a device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.nonzero_static.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
    aten.is_nonzero.default,
}
"""Operations whose result a host must wait for: numbers in Python, and shapes that depend on data."""

EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.empty_like.default}
"""Memory without content: nothing is launched for it."""


class Kernels(TorchDispatchMode):
    """Counts what is dispatched, without views and without memory that nothing is written to yet."""

    def __init__(self):
        super().__init__()
        self.names = []

    @property
    def count(self):
        return len(self.names)

    @property
    def waiting(self):
        return [name for name in self.names if name in {str(each) for each in WAITING}]

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not operation.is_view and operation not in EMPTY:
            self.names.append(str(operation))
        return operation(*args, **(kwargs or {}))
