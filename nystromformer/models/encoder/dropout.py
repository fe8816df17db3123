"""Dropout whose random numbers are cheap on a CPU."""

import torch
from torch import Tensor, nn

LEVELS = 1 << 16


class Dropout(nn.Dropout):
    """`nn.Dropout`, four decisions of which are made by one random number of 64 bits where tensors are on a CPU.

    PyTorch draws its numbers one by one there, on one thread: a tenth of a training step of a small model.
    Probabilities are rounded to 1/65,536, and what is kept is divided by the rounded one: the mean stays the input.
    """

    def forward(self, input: Tensor) -> Tensor:
        dropped = round(self.p * LEVELS)
        if not self.training or input.device.type != "cpu" or torch.compiler.is_compiling() or dropped in (0, LEVELS):
            return super().forward(input)
        count = input.numel()
        words = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(1 << 63), None)
        levels = words.view(torch.int16)[:count].view(input.shape)
        kept = torch.tensor(LEVELS / (LEVELS - dropped), dtype=input.dtype)
        return input * torch.where(levels >= dropped - LEVELS // 2, kept, 0)
