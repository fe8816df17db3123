"""Synthetic slides for multiple-instance learning, irregular tissue on a grid with planted clusters of tiles, and their
classifier: a small TransMIL, its training step by step, and how well slides and tiles are told apart."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from nystromformer.models.mil import TransMIL

FEATURES = 16


@dataclass(frozen=True)
class Slide:
    features: Tensor  # (n, FEATURES)
    cells: Tensor  # (n, 2): row and column of each tile in the grid
    planted: np.ndarray  # (n,) bool: the tiles that make the slide positive
    artifacts: np.ndarray  # (n,) bool: as unusual as planted tiles, in slides of both classes

    @property
    def positive(self) -> bool:
        return bool(self.planted.any())


def draw_slide(seed: int, part: int, index: int, tiles: tuple[int, int], shift: float) -> Slide:
    """Slide `index` of a part of the data, a pure function of its arguments.

    Slides come in pairs of one length, a positive and a negative one.

    Args:
        part: any number; parts have in common what is planted, and nothing else.
        tiles: the fewest and the most tiles of a slide.
        shift: how far planted tiles and artifacts lie from others, in standard deviations of a feature.
    """
    rng = np.random.default_rng([seed, part, index])
    number = round(math.exp(np.random.default_rng([seed, part, index // 2, 1]).uniform(*np.log(tiles))))
    side = math.ceil(math.sqrt(2.2 * number))
    # Tissue: the cells nearest to the center, where "near" follows a smooth random coast.
    y, x = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j]
    coast = 0.2 * smooth_noise(rng, 1, side, side / 12)[0] - np.hypot(x, y)
    places = np.sort(np.argpartition(coast.ravel(), -number)[-number:])
    cells = np.stack(np.divmod(places, side), axis=1)
    # Features: unit variance, partly shared with neighbors, around a stain that is the slide's own.
    shared = smooth_noise(rng, FEATURES, side, 1.5).reshape(FEATURES, -1)[:, places].T
    own, stain = rng.standard_normal((number, FEATURES)), rng.standard_normal(FEATURES)
    features = 0.6 * shared + 0.8 * own + 0.05 * stain

    planted_direction, artifact_direction = directions(seed)
    artifacts = clusters(rng, cells)
    planted = clusters(rng, cells) if index % 2 == 0 else np.zeros(number, dtype=bool)
    features += shift * (artifacts[:, None] * artifact_direction + planted[:, None] * planted_direction)
    return Slide(torch.from_numpy(features).float(), torch.from_numpy(cells), planted, artifacts)


def directions(seed: int) -> np.ndarray:
    """Two orthogonal unit vectors of feature space: what is planted, and what is an artifact."""
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


def pad(slides: list[Slide]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Features (b, n, f), mask (b, n), True for real tiles and None where all are, and cells (b, n, 2) of slides."""
    lengths = torch.tensor([len(slide.features) for slide in slides])
    longest = int(lengths.max())
    return (
        nn.utils.rnn.pad_sequence([slide.features for slide in slides], batch_first=True),
        None if int(lengths.min()) == longest else torch.arange(longest) < lengths[:, None],
        nn.utils.rnn.pad_sequence([slide.cells for slide in slides], batch_first=True),
    )


LANDMARKS = 32


def small_transmil(num_landmarks: int = LANDMARKS) -> TransMIL:
    """A small TransMIL with one logit. With at least as many landmarks as tokens its attention is exact.

    It leaves out the attention's convolution along the sequence: the tiles' neighborhood is that of the grid, and a
    signal carried 16 tiles along its row would blur the map.
    """
    model = TransMIL(FEATURES, 1, dim=64, heads=4, num_landmarks=num_landmarks, conv_kernel_size=None, dropout=0.0)
    nn.init.normal_(model.cls_token, std=0.02)
    for parameter in model.pos_layer.parameters():
        nn.init.zeros_(parameter)  # starts as the identity, so that no tile is blurred before there is a reason to
    return model


@dataclass
class SlideTraining:
    """A model in training for a number of steps, with the losses so far."""

    model: TransMIL
    steps: int
    learning_rate: float = 3e-3
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        total = self.steps + 1
        warm_up = max(0.2, 2 / total)  # at least one step
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, self.learning_rate, total_steps=total, pct_start=warm_up
        )

    def step(self, slides: list[Slide]) -> None:
        labels = torch.tensor([float(slide.positive) for slide in slides])
        loss = functional.binary_cross_entropy_with_logits(self.model(*pad(slides))[:, 0], labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())


def tile_weights(model: TransMIL, slide: Slide) -> np.ndarray:
    """How much the class token takes from each tile, mean over heads: (n,). Raw, since ranks are measured."""
    with torch.no_grad():
        return model.attention_rows(*pad([slide])).mean(dim=1)[0].numpy()


def evaluate(model: TransMIL, slides: Iterable[Slide]) -> dict[str, float]:
    """How well slides are told apart, and planted tiles from others by the map; each slide alone.

    `tile_precision` is the share of planted tiles among the k tiles of highest weight, where k were planted.
    """
    labels, logits, tile_auc, tile_precision = [], [], [], []
    for slide in slides:
        with torch.no_grad():
            logits.append(model(*pad([slide])).item())
        labels.append(slide.positive)
        if slide.positive:
            weights = tile_weights(model, slide)
            tile_auc.append(area_under_curve(slide.planted, weights))
            tile_precision.append(slide.planted[np.argsort(-weights)[: slide.planted.sum()]].mean())
    found = {
        "accuracy": np.mean(np.greater(logits, 0) == labels),
        "auc": area_under_curve(np.array(labels), np.array(logits)),
        "tile_auc": np.mean(tile_auc),
        "tile_auc_worst": np.min(tile_auc),
        "tile_precision": np.mean(tile_precision),
        "tile_precision_worst": np.min(tile_precision),
    }
    return {name: float(value) for name, value in found.items()}


def area_under_curve(labels: np.ndarray, scores: np.ndarray) -> float:
    """How often a positive has a higher score than a negative; half of the ties count.

    >>> area_under_curve(np.array([True, True, False, False]), np.array([3.0, 1.0, 1.0, 0.0]))
    0.875
    """
    negatives = np.sort(scores[~labels])
    below, not_above = (np.searchsorted(negatives, scores[labels], side) for side in ("left", "right"))
    return float(np.mean(below + not_above) / (2 * len(negatives)))
