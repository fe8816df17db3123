"""Segments of tokens that lie in a grid, as the patches of an image do: tiles of it in place of stretches of a row."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from nystromformer.attention.landmarks import Segments, segments


def check_grid(landmarks: str, shape: Sequence[int] | None) -> None:
    """A shape goes with landmarks="grid", and with that alone."""
    if landmarks != "grid":
        if shape is not None:
            raise ValueError(f"grid_shape={shape!r} with landmarks={landmarks!r}: it is for landmarks='grid'.")
        return
    whole = isinstance(shape, Sequence) and all(isinstance(size, int) and size >= 1 for size in shape)
    if shape is None or not whole or len(shape) != 2:
        raise ValueError(f"grid_shape={shape!r}: must be two whole numbers, rows and columns, as (32, 32).")


def tiles_of(shape: Sequence[int], most: int) -> tuple[int, int]:
    """How many rows and columns of tiles: as many tiles as `most` allows, and of those the squarest.

    >>> tiles_of((32, 32), 64), tiles_of((10, 40), 64)
    ((8, 8), (4, 16))
    """
    rows, columns = shape
    fitting = [(a, b) for a, b in product(range(1, most + 1), repeat=2) if a * b <= most and a <= rows and b <= columns]
    return max(fitting, key=lambda tiles: (tiles[0] * tiles[1], -abs(rows * tiles[1] - columns * tiles[0]), tiles))


def grid_segments(tokens: Tensor, num_segments: int, mask: Tensor | None, shape: Sequence[int]) -> Segments:
    """The tiles that `tokens` (b, h, n, d) of a grid of `shape`, row by row, belong to. Some may be empty.

    Examples with at most `num_segments` valid tokens have one token in each segment, as `segments` gives them.

    >>> grid_segments(torch.zeros(1, 1, 16, 1), 4, None, (4, 4)).index.view(4, 4)
    tensor([[0, 0, 1, 1],
            [0, 0, 1, 1],
            [2, 2, 3, 3],
            [2, 2, 3, 3]])
    """
    rows, columns = shape
    batch, length = tokens.shape[0], tokens.shape[2]
    if length != rows * columns:
        raise ValueError(
            f"grid_shape={tuple(shape)} has {rows * columns} places, and there are {length} tokens: must be as many."
        )
    down, across = tiles_of(shape, num_segments)
    row, column = (torch.arange(size, device=tokens.device) for size in (rows, columns))
    tile = (row * down // rows)[:, None] * across + column * across // columns  # (rows columns)
    in_line = segments(tokens, num_segments, mask)
    index = torch.where(in_line.one_token_each[:, None], in_line.index, tile.flatten())  # (b n)
    present = torch.ones_like(index) if mask is None else mask.long()
    counts = present.new_zeros(batch, num_segments).scatter_add(1, index, present)
    return replace(in_line, index=index, counts=counts, size=None)
