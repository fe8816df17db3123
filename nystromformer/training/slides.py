"""Slide classifiers: a small TransMIL, its training step by step, and how well slides and tiles are told apart."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from nystromformer.data.slides import FEATURES, Slide, pad
from nystromformer.models.mil import TransMIL

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
