"""The picture of a slide: what was planted, and where the CLS token of a classifier looks."""

import io
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nystromformer.files import write_bytes

KINDS = ListedColormap(["#ded7e3", "#4f86c6", "#d7263d"])
OUTLINE = "#168f83"
ZOOM = 0.11
"""Half the width of what is enlarged, as a share of the slide."""


def draw_slide_map(
    path: Path, cells: np.ndarray, planted: np.ndarray, artifacts: np.ndarray, maps: dict[str, np.ndarray]
) -> None:
    """A PNG: what was planted, the weights of each of `maps` over the whole slide, and the first around one cluster.

    Args:
        cells: (n, 2), row and column of each tile.
        planted, artifacts: (n,), True for tiles of that kind.
        maps: by title, one weight per tile; all share their colors.
    """
    count = len(cells)
    relative = {title: np.maximum(weights * count, 1) for title, weights in maps.items()}  # 1: all get the same
    scale = LogNorm(1, max(2.0, *(weights.max() for weights in relative.values())))
    figure = Figure(figsize=(4.2 * (len(maps) + 2), 4.6), layout="constrained")
    first, *panels, last = figure.subplots(1, len(maps) + 2)

    kinds = np.where(planted, 2, np.where(artifacts, 1, 0))
    first.imshow(on_grid(cells, kinds), cmap=KINDS, vmin=0, vmax=2, interpolation="nearest")
    first.set_title(f"{planted.sum()} planted tiles among {count:,}")
    first.legend(
        handles=[Rectangle((0, 0), 1, 1, color=KINDS(kind)) for kind in (2, 1)],
        labels=["planted: they make the slide positive", "artifacts: as unusual, in all slides"],
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        frameon=False,
    )
    for panel, (title, weights) in zip(panels, relative.items(), strict=True):
        _draw_weights(panel, cells, weights, scale, title)
    _draw_weights(last, cells, next(iter(relative.values())), scale, "around one cluster, outline: planted")
    last.contour(np.nan_to_num(on_grid(cells, planted)), levels=[0.5], colors="#4ad6c8", linewidths=1.5)
    row, column = cells[planted][np.argmax(next(iter(maps.values()))[planted])]
    reach = ZOOM * cells.max()
    last.set(xlim=(column - reach, column + reach), ylim=(row + reach, row - reach))
    bounds = (column - reach, row - reach, 2 * reach, 2 * reach)
    panels[0].indicate_inset(bounds=bounds, edgecolor=OUTLINE, alpha=1, linewidth=1.5)
    for panel in (first, *panels, last):
        panel.set(xticks=[], yticks=[])
        panel.spines[:].set_visible(panel is last)
    colors = ScalarMappable(scale, "inferno")
    figure.colorbar(colors, ax=[*panels, last], label="weight ÷ mean weight", shrink=0.85)
    content = io.BytesIO()
    figure.savefig(content, dpi=100)
    write_bytes(path, content.getvalue())


def _draw_weights(panel: Axes, cells: np.ndarray, weights: np.ndarray, scale: LogNorm, title: str) -> None:
    panel.imshow(on_grid(cells, weights), cmap="inferno", norm=scale, interpolation="nearest")
    panel.set_title(title)


def on_grid(cells: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One value per tile as a picture of the slide, nan where there is no tissue.

    >>> on_grid(np.array([[0, 0], [1, 1]]), np.array([3, 4]))
    array([[ 3., nan],
           [nan,  4.]])
    """
    rows, columns = cells.T
    picture = np.full((rows.max() + 1, columns.max() + 1), np.nan)
    picture[rows, columns] = values
    return picture
