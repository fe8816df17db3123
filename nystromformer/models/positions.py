"""Learned positions for longer input than a model was trained on."""

import torch
from torch import Tensor

from nystromformer.attention.checks import check_at_least


def tile_positions(table: Tensor, offset: int, length: int) -> Tensor:
    """The position table (offset + n, d) for `length` tokens: its n positions are repeated, or cut off.

    Tiling keeps what the model knows about neighbours, except where one copy ends and the next begins (the paper's
    models for long input start so). The first `offset` rows stand for no position and stay.

    >>> tile_positions(torch.tensor([[-1.0], [0.0], [1.0], [2.0]]), offset=1, length=5).flatten()
    tensor([-1.,  0.,  1.,  2.,  0.,  1.])
    """
    check_at_least("length", length, 1)
    before, positions = table[:offset], table[offset:]
    copies = -(-length // positions.shape[0])
    return torch.cat((before, positions.repeat(copies, 1)[:length]))
