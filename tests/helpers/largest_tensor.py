"""What memory tests watch: the largest tensor that is made, and the sizes of those that are saved."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives back, counted by the memory that it owns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


@contextmanager
def saved_sizes():
    """The elements of each tensor that is saved for a backward, counted by the memory that it owns."""
    sizes: list[int] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        sizes.append(x.untyped_storage().nbytes() // x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield sizes
