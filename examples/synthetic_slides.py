"""Synthetic slides for multiple-instance learning: irregular tissue on a grid, with planted clusters of tiles."""

import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
from torch import Tensor, nn

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.colors import ListedColormap, LogNorm

FEATURES = 16


@dataclass(frozen=True)
class Slide:
    features: Tensor  # (n, FEATURES)
    cells: Tensor  # (n, 2): row and column of each tile in the grid
    planted: np.ndarray  # (n,) bool: the tiles that make the slide positive
    artefacts: np.ndarray  # (n,) bool: as unusual as planted tiles, in slides of both classes

    @property
    def positive(self) -> bool:
        return bool(self.planted.any())


def draw_slide(seed: int, part: int, index: int, tiles: tuple[int, int], shift: float) -> Slide:
    """Slide `index` of a part of the data, a pure function of its arguments.

    Slides come in pairs of one length, a positive and a negative one.

    Args:
        part: any number; parts have in common what is planted, and nothing else.
        tiles: the fewest and the most tiles of a slide.
        shift: how far planted tiles and artefacts lie from others, in standard deviations of a feature.
    """
    rng = np.random.default_rng([seed, part, index])
    tiles = round(math.exp(np.random.default_rng([seed, part, index // 2, 1]).uniform(*np.log(tiles))))
    side = math.ceil(math.sqrt(2.2 * tiles))
    # Tissue: the cells nearest to the centre, where "near" follows a smooth random coast.
    y, x = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j]
    coast = 0.2 * smooth_noise(rng, 1, side, side / 12)[0] - np.hypot(x, y)
    places = np.sort(np.argpartition(coast.ravel(), -tiles)[-tiles:])
    cells = np.stack(np.divmod(places, side), axis=1)
    # Features: unit variance, partly shared with neighbours, around a stain that is the slide's own.
    shared = smooth_noise(rng, FEATURES, side, 1.5).reshape(FEATURES, -1)[:, places].T
    own, stain = rng.standard_normal((tiles, FEATURES)), rng.standard_normal(FEATURES)
    features = 0.6 * shared + 0.8 * own + 0.05 * stain

    planted_direction, artefact_direction = directions(seed)
    artefacts = clusters(rng, cells)
    planted = clusters(rng, cells) if index % 2 == 0 else np.zeros(tiles, dtype=bool)
    features += shift * (artefacts[:, None] * artefact_direction + planted[:, None] * planted_direction)
    return Slide(torch.from_numpy(features).float(), torch.from_numpy(cells), planted, artefacts)


def directions(seed: int) -> np.ndarray:
    """Two orthogonal unit vectors of feature space: what is planted, and what is an artefact."""
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((FEATURES, 2)))[0].T


def smooth_noise(rng: np.random.Generator, maps: int, side: int, length: float) -> np.ndarray:
    """White noise under a Gaussian of `length` cells, of unit variance again: (maps, side, side)."""
    rows, columns = np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)
    low_pass = np.exp(-2 * (np.pi * length) ** 2 * (rows**2 + columns**2))
    noise = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((maps, side, side))) * low_pass, s=(side, side))
    return noise / noise.std(axis=(1, 2), keepdims=True)


def clusters(rng: np.random.Generator, cells: np.ndarray) -> np.ndarray:
    """Ragged clusters of up to 60 tiles, together 0.2 to 1 % of all tiles and 4 at least: (n,) bool."""
    chosen = np.zeros(len(cells), dtype=bool)
    wanted = max(4, round(rng.uniform(0.002, 0.01) * len(cells)))
    while (missing := wanted - chosen.sum()) > 0:
        size = min(round(math.exp(rng.uniform(*np.log((4, 60))))), missing)
        distance = np.hypot(*(cells - cells[rng.integers(len(cells))]).T) * rng.uniform(0.8, 1.2, len(cells))
        chosen[np.argpartition(distance, size)[:size]] = True
    return chosen


def pad(slides: list[Slide]) -> tuple[Tensor, Tensor, Tensor]:
    """Features (b, n, f), mask (b, n), True for real tiles, and cells (b, n, 2) of some slides."""
    lengths = torch.tensor([len(slide.features) for slide in slides])
    return (
        nn.utils.rnn.pad_sequence([slide.features for slide in slides], batch_first=True),
        torch.arange(int(lengths.max())) < lengths[:, None],
        nn.utils.rnn.pad_sequence([slide.cells for slide in slides], batch_first=True),
    )


def draw_map(slide: Slide, weights: np.ndarray, path: Path) -> None:
    """A PNG: what was planted, one weight a tile over the whole slide, and both together around one cluster."""
    kinds = np.where(slide.planted, 2, np.where(slide.artefacts, 1, 0))
    kind_colors = ListedColormap(["#ded7e3", "#4f86c6", "#d7263d"])
    relative = np.maximum(weights * len(weights), 1)  # 1: what a tile would get if all got the same
    scale = LogNorm(1, relative.max())

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4.6), layout="constrained")
    axes[0].imshow(on_grid(slide, kinds), cmap=kind_colors, vmin=0, vmax=2, interpolation="nearest")
    axes[0].set_title(f"{slide.planted.sum()} planted tiles among {len(weights):,}")
    axes[0].legend(
        handles=[pyplot.Rectangle((0, 0), 1, 1, color=kind_colors(kind)) for kind in (2, 1)],
        labels=["planted: they make the slide positive", "artefacts: as unusual, in all slides"],
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        frameon=False,
    )
    axes[1].imshow(on_grid(slide, relative), cmap="inferno", norm=scale, interpolation="nearest")
    axes[1].set_title("attention of the CLS token")
    drawn = axes[2].imshow(on_grid(slide, relative), cmap="inferno", norm=scale, interpolation="nearest")
    axes[2].contour(np.nan_to_num(on_grid(slide, slide.planted)), levels=[0.5], colors="#4ad6c8", linewidths=1.5)
    row, column = slide.cells.numpy()[slide.planted][np.argmax(weights[slide.planted])]
    reach = 0.11 * max(slide.cells.amax(dim=0).tolist())
    axes[2].set(xlim=(column - reach, column + reach), ylim=(row + reach, row - reach))
    axes[2].set_title("around one cluster, outline: planted")
    axes[1].indicate_inset(
        bounds=(column - reach, row - reach, 2 * reach, 2 * reach), edgecolor="#168f83", alpha=1, linewidth=1.5
    )
    for axis in axes:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(axis is axes[2])
    figure.colorbar(drawn, ax=axes[1:], label="weight ÷ mean weight", shrink=0.85)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def on_grid(slide: Slide, values: np.ndarray) -> np.ndarray:
    """One value a tile as a picture of the slide, nan where there is no tissue."""
    rows, columns = slide.cells.numpy().T
    picture = np.full((rows.max() + 1, columns.max() + 1), np.nan)
    picture[rows, columns] = values
    return picture
