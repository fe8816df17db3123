"""Rotary positions: queries and keys are turned by angles that grow with their position (Su et al., 2021).

Turned by position, a query and a key have a product that depends on how far apart they stand, not on where. Any
attention that sees queries and keys only through products, or through sums weighted alike for each of them, keeps that:
shift all positions by the same number and nothing changes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nystromformer.attention.common import at_least_float32

BASE = 10_000.0
"""Wave lengths go from 2π tokens in the first pair of numbers to nearly 2π · BASE in the last."""


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which tokens are turned, each (b or 1, 1, n, d / 2)."""

    cosine: Tensor
    sine: Tensor


def rotation_of(position_ids: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """The angles of tokens at `position_ids` (b or 1, n), in `dtype` but at least in float32.

    >>> rotation_of(torch.arange(3)[None], head_dim=4, dtype=torch.float32).cosine.shape
    torch.Size([1, 1, 3, 2])
    """
    dtype = at_least_float32(dtype)
    exponents = torch.arange(0, head_dim, 2, dtype=dtype, device=position_ids.device) / head_dim  # (d/2)
    angles = position_ids[:, None, :, None].to(dtype) * BASE**-exponents  # (b 1 n d/2)
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """`x` (b, h, n, d) with each pair of numbers (j, j + d / 2) turned; computed at least in float32.

    >>> x = torch.randn(1, 2, 5, 8)
    >>> turned = rotate(x, rotation_of(torch.arange(5)[None], head_dim=8, dtype=x.dtype))
    >>> torch.allclose(turned.norm(dim=-1), x.norm(dim=-1)), torch.equal(turned[:, :, 0], x[:, :, 0])
    (True, True)
    """
    first, second = x.to(rotation.cosine.dtype).chunk(2, dim=-1)  # (b h n d/2)
    cosine, sine = rotation
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
