"""The grid that tiles of a slide were cut from: where each tile stands, and convolutions over it."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from nystromformer.attention.shared.common import shape_of

MOST_CELLS = 2**20
"""Cells of the grid around a bag: 1,024 × 1,024 tiles are more than any slide has, pixels would be millions."""


class GridConvolution(nn.Module):
    """TransMIL's position encoding (PPEG): adds depthwise convolutions over the tiles' grid, 7, 5 and 3 wide."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj, self.proj1, self.proj2 = (
            nn.Conv2d(dim, dim, size, padding=size // 2, groups=dim) for size in (7, 5, 3)
        )

    def forward(self, tiles: Tensor, cells: Tensor, real: Tensor) -> Tensor:
        """`tiles` (b, n, dim) with what the convolutions give at `cells` (b, n, 2); tiles of one cell are added."""
        height, width = (int(size) + 1 for size in cells.amax(dim=(0, 1)))
        place = (cells[..., 0] * width + cells[..., 1])[..., None].expand_as(tiles)
        present = tiles.masked_fill(~real[..., None], 0)  # padding says cell (0, 0): it must add nothing there
        grid = tiles.new_zeros(len(tiles), height * width, tiles.shape[2]).scatter_add(1, place, present)
        # The sum of three convolutions is one with the sum of their kernels, at a third of the time.
        kernel = (
            self.proj.weight + functional.pad(self.proj1.weight, [1] * 4) + functional.pad(self.proj2.weight, [2] * 4)
        )
        bias = _bias(self.proj) + _bias(self.proj1) + _bias(self.proj2)
        image = grid.unflatten(1, (height, width)).permute(0, 3, 1, 2)  # (b d h w), channels last in memory
        image = functional.conv2d(image, kernel, bias, padding=3, groups=len(kernel))
        return tiles + image.permute(0, 2, 3, 1).flatten(1, 2).gather(1, place)


def square_cells(real: Tensor) -> Tensor:
    """Row and column (b, n, 2) of each real tile when they fill the smallest square, row by row; 0 for padding.

    >>> square_cells(torch.tensor([[True, False, True, True]]))[0].tolist()
    [[0, 0], [0, 0], [0, 1], [1, 0]]
    """
    counts = real.sum(dim=1, keepdim=True)
    side = counts.double().sqrt().ceil().long().clamp(min=1)
    rank = (real.long().cumsum(dim=1) - 1).clamp(min=0)
    cells = torch.stack([rank.div(side, rounding_mode="floor"), rank % side], dim=2)
    return cells.masked_fill(~real[..., None], 0)


def checked_cells(coordinates: Tensor, real: Tensor) -> Tensor:
    """`coordinates` (b, n, 2), checked, from 0 for the first row and column of each bag; 0 for padding."""
    check_coordinates(coordinates, (*real.shape, 2))
    cells, padding = coordinates.long(), ~real[..., None]
    first = cells.masked_fill(padding, torch.iinfo(torch.long).max).amin(dim=1, keepdim=True)
    cells = (cells - first).masked_fill(padding, 0)
    height, width = (int(size) + 1 for size in cells.amax(dim=(0, 1)))
    if height * width > MOST_CELLS:
        raise ValueError(
            f"coordinates span {height:,} × {width:,} cells: at most {MOST_CELLS:,}; give row and column of the tile, "
            f"which are pixels divided by the size of a tile."
        )
    return cells


def check_coordinates(coordinates: Tensor, shape: tuple[int, ...]) -> None:
    if coordinates.is_floating_point() or coordinates.is_complex() or coordinates.dtype == torch.bool:
        raise TypeError(
            f"coordinates have dtype {coordinates.dtype}: must be whole numbers, row and column of each tile; divide "
            f"pixels by the size of a tile, and convert with .long()."
        )
    if coordinates.shape != shape:
        raise ValueError(f"coordinates have shape {shape_of(coordinates)}: must be {shape}.")


def _bias(convolution: nn.Conv2d) -> Tensor:
    assert convolution.bias is not None
    return convolution.bias
