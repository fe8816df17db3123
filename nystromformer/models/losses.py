"""Losses as a sum and the number of items summed, so that any way of accumulating gradients can divide rightly."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from nystromformer.attention.common import shape_of
from nystromformer.checks import check_choice
from nystromformer.models.configuration import NystromformerConfig

IGNORED = -100
"""The label of tokens and examples that don't count, as everywhere in Transformers."""

PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


Count = Tensor | int | None
"""What HF Trainer passes as `num_items_in_batch`."""


@dataclass(frozen=True)
class Tally:
    """A loss summed over items, before any division."""

    loss_sum: Tensor
    count: Tensor
    correct: Tensor

    def mean(self, num_items: Count = None) -> Tensor:
        """The loss per item: of this batch, or this batch's part in the mean over `num_items`.

        HF Trainer passes the number of items of all batches between two optimizer steps as `num_items_in_batch`. The
        gradients of those batches then add up to that of one large batch. Nothing to count gives 0.
        """
        count = self.count if num_items is None else torch.as_tensor(num_items, device=self.loss_sum.device)
        return self.loss_sum / count.clamp(min=1)


def cross_entropy_tally(logits: Tensor, labels: Tensor) -> Tally:
    """Cross-entropy of `logits` (..., classes) for `labels` (...), in float32; labels of -100 are left out.

    >>> cross_entropy_tally(torch.tensor([[9.0, 0.0], [0.0, 9.0]]), torch.tensor([0, -100])).count
    tensor(1)
    """
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {shape_of(labels)}: must be {tuple(logits.shape[:-1])}, one for each logit row."
        )
    logits, labels = logits.flatten(0, -2).float(), labels.flatten()
    counted = labels != IGNORED
    loss_sum = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    correct = (logits.detach().argmax(dim=-1) == labels).sum()  # -100 is no class, so ignored ones are never equal
    return Tally(loss_sum, counted.sum(), correct)


def class_loss(logits: Tensor, labels: Tensor | None, num_items: Count = None) -> Tensor | None:
    """The mean cross-entropy, as `Tally.mean` has it; None without labels."""
    return None if labels is None else cross_entropy_tally(logits, labels).mean(num_items)


def sequence_loss(logits: Tensor, labels: Tensor, config: NystromformerConfig, num_items: Count = None) -> Tensor:
    """Loss of a sequence classifier or regressor: `logits` (b, labels), by `config.problem_type`.

    Without a `problem_type`: one label is regression, whole numbers are classes, anything else is several labels at
    once. The mean goes over all numbers in `labels`, which is what HF Trainer counts.
    """
    problem = config.problem_type or _problem(logits, labels)
    check_choice("problem_type", problem, PROBLEMS)
    if problem == "single_label_classification":
        return cross_entropy_tally(logits, labels.flatten()).mean(num_items)
    if labels.numel() != logits.numel():
        raise ValueError(
            f"labels have shape {shape_of(labels)}: {problem} with logits {tuple(logits.shape)} needs as many numbers."
        )
    logits, labels = logits.float(), labels.view_as(logits).float()
    if problem == "regression":
        total = functional.mse_loss(logits, labels, reduction="sum")
    else:
        total = functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return total / (labels.numel() if num_items is None else num_items)


def _problem(logits: Tensor, labels: Tensor) -> str:
    if logits.shape[-1] == 1:
        return "regression"
    is_class = not labels.is_floating_point() and labels.dtype != torch.bool
    return "single_label_classification" if is_class else "multi_label_classification"
