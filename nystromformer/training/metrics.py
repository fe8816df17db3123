"""Scores of predicted classes and numbers, from scikit-learn and SciPy. More is better in all of them."""

import math
from collections.abc import Callable

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers.trainer_utils import EvalPrediction


def _correlation(measure: Callable) -> Callable[[np.ndarray, np.ndarray], float]:
    def score(labels: np.ndarray, predictions: np.ndarray) -> float:
        # undefined where either is constant or there is one example; it tells nothing then, and NaN is never the best
        if len(labels) < 2 or np.ptp(labels) == 0 or np.ptp(predictions) == 0:
            return 0.0
        value = float(measure(labels, predictions)[0])
        return value if math.isfinite(value) else 0.0

    return score


METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": lambda labels, predictions: float(accuracy_score(labels, predictions)),
    "f1": lambda labels, predictions: float(f1_score(labels, predictions, zero_division=0.0)),
    "matthews": lambda labels, predictions: float(matthews_corrcoef(labels, predictions)),
    "pearson": _correlation(pearsonr),
    "spearman": _correlation(spearmanr),
}
"""score(labels, predictions) by name. F1 is that of class 1."""


def scores(names: tuple[str, ...], labels: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    """
    >>> scores(("f1", "accuracy"), np.array([1, 1, 0, 1]), np.array([1, 0, 0, 1]))
    {'f1': 0.8, 'accuracy': 0.75}
    """
    return {name: METRICS[name](labels, predictions) for name in names}


def metric_function(names: tuple[str, ...]) -> Callable[[EvalPrediction], dict[str, float]]:
    """For HF Trainer."""
    return lambda prediction: scores(names, prediction.label_ids, prediction.predictions)
