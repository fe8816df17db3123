"""Pathfinder's pictures as grey levels."""

import numpy as np

from nystromformer.data.lra.pathfinder_contours import PathfinderOptions, Picture


def draw(picture: Picture, options: PathfinderOptions) -> np.ndarray:
    """White on black, (size, size). Drawn `antialias` times as large and averaged down."""
    scale, size = options.antialias, options.size
    canvas = np.zeros((size * scale, size * scale))
    paddles = np.concatenate(picture.contours)
    _put(canvas, paddles, options.paddle_thickness / 2, options.contrast, scale)
    _put(canvas, np.repeat(picture.markers[:, None], 2, axis=1), options.marker_radius, 1.0, scale)
    small = canvas.reshape(size, scale, size, scale).mean(axis=(1, 3))
    return np.round(small * 255).astype(np.uint8)


def _put(canvas: np.ndarray, lines: np.ndarray, radius: float, brightness: float, scale: int) -> None:
    """Draw lines (l, 2, x y) of a half-width of `radius`; a line without length is a disc."""
    middle = lines.mean(axis=1)
    reach = np.linalg.norm(lines[:, 1] - lines[:, 0], axis=1).max() / 2 + radius
    half = int(np.ceil(reach * scale)) + 1
    window = np.stack(np.meshgrid(*(np.arange(-half, half + 1),) * 2), axis=-1).reshape(-1, 2)  # (w, x y)
    cells = np.floor(middle * scale).astype(int)[:, None] + window  # (l, w, x y): all that a line can touch
    distance = distances_to_lines((cells + 0.5) / scale, lines)  # (l, w)
    # A cell is as bright as its share that the line covers; one thinner than a cell is never lost.
    ink = brightness * np.clip((radius - distance) * scale + 0.5, 0, 1)
    inside = ((cells >= 0) & (cells < len(canvas))).all(axis=-1)
    np.maximum.at(canvas, (cells[inside][:, 1], cells[inside][:, 0]), ink[inside])


def distances_to_lines(points: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Distances from points (l, p, 2) to lines (l, 2, 2): (l, p).

    >>> float(distances_to_lines(np.array([[[0.0, 3.0]]]), np.array([[[-1.0, 0.0], [1.0, 0.0]]]))[0, 0])
    3.0
    """
    start, along = lines[:, :1], lines[:, 1:] - lines[:, :1]  # (l, 1, 2)
    offset = points - start
    share = np.clip((offset * along).sum(-1) / np.maximum((along * along).sum(-1), 1e-12), 0, 1)
    return np.sqrt(np.square(offset - share[..., None] * along).sum(-1))


def contact_sheet(pictures: list[np.ndarray], columns: int, magnify: int = 4) -> np.ndarray:
    """Pictures (n, n) side by side on grey, magnified for the eye."""
    cell = len(pictures[0]) + 4
    rows = -(-len(pictures) // columns)
    sheet = np.full((rows * cell, columns * cell), 60, dtype=np.uint8)
    for index, picture in enumerate(pictures):
        y, x = index // columns * cell + 2, index % columns * cell + 2
        sheet[y : y + len(picture), x : x + len(picture)] = picture
    return sheet.repeat(magnify, axis=0).repeat(magnify, axis=1)
