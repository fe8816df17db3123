"""Pathfinder: pictures drawn, written as Long Range Arena has them, and read.

There are two long dashed contours, short ones to distract, and a marker on two of the four long ends. The label says
whether both markers lie on one contour. It is certain by construction: consecutive paddles of a contour are `margin`
apart, and paddles of different contours more than twice as far.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from nystromformer.data.hub import nearby
from nystromformer.data.lra.examples import Examples, Sequences, Splits, check_count, described_folder, pixels_of
from nystromformer.data.parallel import Progress, in_order

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
    """Pictures (n, n) side by side on gray, magnified for the eye."""
    cell = len(pictures[0]) + 4
    rows = -(-len(pictures) // columns)
    sheet = np.full((rows * cell, columns * cell), 60, dtype=np.uint8)
    for index, picture in enumerate(pictures):
        y, x = index // columns * cell + 2, index % columns * cell + 2
        sheet[y : y + len(picture), x : x + len(picture)] = picture
    return sheet.repeat(magnify, axis=0).repeat(magnify, axis=1)


SIZE = 32

CLASSES = 2

DIFFICULTY = "curv_contour_length_14"

SPLIT = (0.8, 0.9)
"""LRA trains on the first 80 %, and the next 10 % are for development."""

BATCH = 1000
"""Pictures of one folder `imgs/K`, as in the release."""


@dataclass(frozen=True, kw_only=True)
class PathfinderSetOptions:
    """The defaults are LRA's, of its hard set."""

    count: int = 200_000
    contour_length: int = 14
    """Paddles of a long contour. Shorter ones are easier to follow; LRA has 6 and 9, too."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 20 or self.count % 2:
            raise ValueError(f"count={self.count}: must be even, for balance, and at least 20; LRA has 200,000.")
        if not 3 <= self.contour_length <= 14:
            raise ValueError(f"contour_length={self.contour_length}: must be 3 to 14; LRA has 6, 9 and 14.")

    @property
    def pictures(self) -> PathfinderOptions:
        return PathfinderOptions(contour_length=self.contour_length, distractor_length=self.contour_length // 3)


def picture_number(index: int, seed: int, options: PathfinderOptions) -> tuple[np.ndarray, bool]:
    """Picture `index` of the endless sequence that belongs to a seed, with its label.

    One of each two consecutive pictures is connected, which of them is chance: any part of the set is balanced.
    """
    first_is_connected = np.random.default_rng([seed, index // 2, 0]).random() < 0.5
    connected = bool(first_is_connected) ^ bool(index % 2)
    rng = np.random.default_rng([seed, index, 1])
    return draw(random_picture(rng, connected, options), options), connected


def generate(
    out: Path, options: PathfinderSetOptions, workers: int | None = None, progress: Progress | None = None
) -> None:
    """Write a set into the folder `out`. The same seed gives the same pictures whatever the number of `workers`."""
    folders = math.ceil(options.count / BATCH)
    description = {
        "task": "pathfinder",
        "options": {**asdict(options), **asdict(options.pictures)},
        "examples": {"all": options.count},
    }
    with described_folder(out, description) as folder:
        inner = folder / f"curv_contour_length_{options.contour_length}"
        (inner / "metadata").mkdir(parents=True)
        parts = [(number, range(number * BATCH, min((number + 1) * BATCH, options.count))) for number in range(folders)]
        write = partial(write_batch, inner, options.seed, options.pictures)
        made = 0
        for written in in_order(write, parts, 1 if len(parts) == 1 else workers):
            made += written
            if progress:
                progress(made, options.count)


def write_batch(folder: Path, seed: int, options: PathfinderOptions, part: tuple[int, range]) -> int:
    """The pictures and the metadata of one folder `imgs/K`; returns how many."""
    from PIL import Image

    number, indices = part
    (folder / "imgs" / str(number)).mkdir(parents=True)
    rows = []
    for sample, index in enumerate(indices):
        pixels, connected = picture_number(index, seed, options)
        Image.fromarray(pixels).save(folder / "imgs" / str(number) / f"sample_{sample}.png")
        rows.append(
            f"imgs/{number} sample_{sample}.png {sample} {int(connected)} {options.continuity} "
            f"{options.contour_length} {options.distractor_length} {options.num_distractors}\n"
        )
    (folder / "metadata" / f"{number}.npy").write_text("".join(rows))
    return len(rows)


def preview(path: Path, options: PathfinderSetOptions, columns: int = 8) -> None:
    """A sheet of the first pictures of a seed: those on the left are connected, those on the right are not."""
    from PIL import Image

    pairs: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for index in range(columns * columns):
        pixels, connected = picture_number(index, options.seed, options.pictures)
        pairs[connected].append(pixels)
    half = columns // 2
    rows = [pairs[side][row * half : (row + 1) * half] for row in range(columns) for side in (True, False)]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(contact_sheet([picture for row in rows for picture in row], columns)).save(path)


def read(folder: Path, max_length: int) -> Splits:
    """Read LRA's folder or ours: the one that holds `curv_contour_length_14`, or that one itself.

    Another difficulty is read where it is the only one.
    """
    root, others = folder, sorted(folder.glob("curv_*"))
    if (folder / DIFFICULTY).is_dir():
        folder = folder / DIFFICULTY
    elif len(others) == 1:
        folder = others[0]
    metadata = sorted((folder / "metadata").glob("*.npy"), key=_number)
    if not metadata:
        raise ValueError(
            f"{folder}: no metadata/*.npy; must hold LRA's {DIFFICULTY}/imgs and metadata, but "
            f"{nearby(folder / 'metadata')}"
        )
    pictures, labels = [], []
    contours: set[int] = set()
    for path in metadata:
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            fields = line.split()
            picture, label = _picture_and_label(folder, path, number, fields)
            pictures.append(pixels_of(picture, picture, SIZE).tobytes()[:max_length])
            labels.append(label)
            contours.update(int(paddles) for paddles in fields[5:6] if paddles.isdecimal())
    check_count(root, folder, "all", len(labels))
    examples = Examples((Sequences.of(pictures),), np.array(labels, dtype=np.int64))
    dev, test = (int(share * len(labels)) for share in SPLIT)
    return Splits(
        train=examples.choose(slice(None, dev)),
        dev=examples.choose(slice(dev, test)),
        test=examples.choose(slice(test, None)),
        departures=_departures(contours),
    )


def _departures(contours: set[int]) -> tuple[str, ...]:
    """What tells pictures with contours of so many paddles from the hard set, as far as they say.

    >>> _departures({14}), _departures({9, 6})
    ((), ('contours of 6, 9 paddles',))
    """
    if contours <= {PathfinderOptions().contour_length}:
        return ()
    return (f"contours of {', '.join(map(str, sorted(contours)))} paddles",)


def _picture_and_label(folder: Path, path: Path, number: int, fields: list[str]) -> tuple[Path, int]:
    if len(fields) < 4:
        raise ValueError(
            f"{path}, line {number}: {len(fields)} fields; must be at least 4 (folder, file, number, label): the file "
            f"was cut short, copy it again."
        )
    if fields[3] not in ("0", "1"):
        raise ValueError(f"{path}, line {number}: label {fields[3]!r}; must be 0 or 1: fix or remove the line.")
    picture = folder / fields[0] / fields[1]
    if not picture.is_file():
        raise ValueError(f"{picture}: no such file, but {path}, line {number}, names it; copy the pictures again.")
    return picture, int(fields[3])


def _number(path: Path) -> int:
    try:
        return int(path.stem)
    except ValueError as error:
        raise ValueError(f"{path}: must be named by a number, as 0.npy; remove it.") from error
