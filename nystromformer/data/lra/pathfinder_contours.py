"""Pathfinder's geometry: two long dashed contours, short ones to distract, and a marker on two of the four long ends.

The label says whether both markers lie on one contour. It is certain by construction: consecutive paddles of a contour
are `margin` apart, and paddles of different contours more than twice as far.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

TURNS = 8
"""Directions tried for the next paddle before the contour is given up."""
STARTS = 16
"""Places looked at for free ground to start a contour on."""
ATTEMPTS = 150
"""Contours tried before a picture is started anew."""
CELLS = 8
"""A pixel is so many cells wide in the map of what is taken."""
BORDER = 8
"""Pixels around the map, all taken, so that a point outside needs no test of its own."""
HIDDEN = 0.25
"""What cells (0.18 at most) and the distance between points on a paddle (0.05) can hide of a distance, in pixels."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class PathfinderOptions:
    """Lengths in pixels. The defaults are the published parameters of the hard 32×32 set."""

    size: int = 32
    contour_length: int = 14
    """Paddles of a long contour."""
    distractor_length: int = 14 // 3
    num_distractors: int = 20 // 4
    paddle_length: float = 2.0
    paddle_thickness: float = 0.5
    margin: float = 1.0
    """Between consecutive paddles, and from the edge of the picture."""
    marker_radius: float = 1.5
    seed_distance: float = 7.0
    """Between the two markers, at least."""
    continuity: float = 1.0
    """Radians that a contour turns at most from one paddle to the next."""
    contrast: float = 0.75
    """Of paddles; markers have 1."""
    antialias: int = 2
    """Pictures are drawn so many times as large and averaged down."""

    def __post_init__(self) -> None:
        for name in ("contour_length", "distractor_length", "size", "antialias"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if self.num_distractors < 0:
            raise ValueError(f"num_distractors={self.num_distractors}: must be at least 0.")
        if not 0 < self.paddle_length <= 2:
            raise ValueError(f"paddle_length={self.paddle_length}: must be above 0 and at most 2, as published.")

    @property
    def clearance(self) -> float:
        """Between the center lines of different contours: their ink is then twice `margin` apart."""
        return 2 * self.margin + self.paddle_thickness


@dataclass(frozen=True)
class Picture:
    """The contours, each (paddles, 2 ends, x y), long ones first; the two markers (2, x y); the label."""

    contours: list[np.ndarray]
    markers: np.ndarray
    connected: bool


def random_picture(rng: np.random.Generator, connected: bool, options: PathfinderOptions) -> Picture:
    """A random picture. Both labels have contours of the same kind; they differ only in which ends are marked."""
    while True:
        contours = random_contours(rng, options)
        if contours is None:
            continue
        ends = [(contour[0, 0], contour[-1, 1]) for contour in contours[:2]]  # of the two long ones
        first = rng.integers(2)
        if connected:
            markers = np.array(ends[first])
        else:
            markers = np.array([ends[first][rng.integers(2)], ends[1 - first][rng.integers(2)]])
        if math.dist(*markers) >= options.seed_distance:
            return Picture(contours, markers, connected)


def random_contours(rng: np.random.Generator, options: PathfinderOptions) -> list[np.ndarray] | None:
    """All contours of a picture, or None where there was no room for the last ones."""
    lengths = [options.contour_length] * 2 + [options.distractor_length] * options.num_distractors
    from_marker = options.clearance + options.marker_radius / 2
    paths, markers = Ground(options), Ground(options)  # where the next contour and its markers can't go
    contours: list[np.ndarray] = []
    for _ in range(ATTEMPTS):
        paddles = random_contour(rng, lengths[len(contours)], paths, options)
        if paddles is None:
            continue
        ends = [paddles[0][0], paddles[-1][1]] if len(contours) < 2 else []
        if markers.is_taken(ends):
            continue
        points = [point for paddle in paddles for point in points_of(paddle)]
        paths.take(points, options.clearance)
        paths.take(ends, from_marker)
        markers.take(points, from_marker)
        contours.append(np.array(paddles))
        if len(contours) == len(lengths):
            return contours
    return None


def random_contour(
    rng: np.random.Generator, length: int, ground: "Ground", options: PathfinderOptions
) -> list[tuple[Point, Point]] | None:
    """The paddles of a contour over free ground, or None where it ran into a corner."""
    starts = rng.uniform(options.margin, options.size - options.margin, (STARTS, 2)).tolist()
    x, y = next((start for start in starts if not ground.is_taken([start])), (0.0, 0.0))
    ground = ground.copy()
    heading, turn = rng.uniform(0, 2 * math.pi), 0.0
    bends = rng.normal(0, options.continuity / 2, (length, TURNS)).tolist()
    paddles: list[tuple[Point, Point]] = []
    for index in range(length):
        if index >= 3:  # the last two are near by intention, around a bend
            ground.take(points_of(paddles[index - 3]), options.clearance)
        gap = options.margin if index else 0.0
        for bend in bends[index]:
            # Turns follow each other smoothly: half of the last one and something new.
            new_turn = max(-options.continuity, min(options.continuity, 0.5 * turn + bend))
            between, new_heading = heading + new_turn / 2, heading + new_turn
            start = (x + gap * math.cos(between), y + gap * math.sin(between))
            end = (
                start[0] + options.paddle_length * math.cos(new_heading),
                start[1] + options.paddle_length * math.sin(new_heading),
            )
            if not ground.is_taken(points_of((start, end))):
                break
        else:
            return None
        paddles.append((start, end))
        (x, y), heading, turn = end, new_heading, new_turn
    return paddles


def points_of(paddle: tuple[Point, Point]) -> tuple[Point, Point, Point]:
    """Its ends and its middle: at most a pixel from each other."""
    (x0, y0), (x1, y1) = paddle
    return (x0, y0), ((x0 + x1) / 2, (y0 + y1) / 2), (x1, y1)


class Ground:
    """A map of what is taken, in cells of a fraction of a pixel. Everything beyond the margin is."""

    def __init__(self, options: PathfinderOptions, taken: np.ndarray | None = None) -> None:
        self.options = options
        if taken is None:
            taken = np.ones(((options.size + 2 * BORDER) * CELLS,) * 2, dtype=bool)
            edge = math.ceil((BORDER + options.margin) * CELLS)
            taken[edge:-edge, edge:-edge] = False
        self.taken = taken

    def copy(self) -> "Ground":
        return Ground(self.options, self.taken.copy())

    def is_taken(self, points: Iterable[Point]) -> bool:
        """Whether any of the points is."""
        return any(self.taken[int((y + BORDER) * CELLS), int((x + BORDER) * CELLS)] for x, y in points)

    def take(self, points: Iterable[Point], radius: float) -> None:
        """Everything up to `radius` from the points."""
        disc = disc_of_cells(radius + HIDDEN)
        half = len(disc) // 2
        for x, y in points:
            row, column = int((y + BORDER) * CELLS) - half, int((x + BORDER) * CELLS) - half
            self.taken[row : row + len(disc), column : column + len(disc)] |= disc


@lru_cache
def disc_of_cells(radius: float) -> np.ndarray:
    """The cells up to `radius` pixels from a cell: a square with an odd side.

    >>> disc_of_cells(1 / CELLS).astype(int)
    array([[0, 1, 0],
           [1, 1, 1],
           [0, 1, 0]])
    """
    half = math.floor(radius * CELLS)
    offset = np.arange(-half, half + 1)
    return offset[:, None] ** 2 + offset**2 <= (radius * CELLS) ** 2
