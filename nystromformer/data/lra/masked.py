"""Examples of self-pretraining: the inputs of a task without their labels, with some tokens masked."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nystromformer.data.lra.examples import PADDING, Examples

MASK = PADDING
"""Stands for a masked token. Padding has no other use for its id, since it is masked out of attention: so the encoder
of self-pretraining is the classifier's, without a token more."""

UNMASKED = -100
"""The label of tokens that are not asked for, as everywhere in Transformers."""


@dataclass(frozen=True)
class MaskedExamples(torch.utils.data.Dataset):
    """Which tokens are masked is a function of (seed, epoch, index) alone. Without an epoch, as in evaluations, the
    same ones each time.

    >>> from nystromformer.data.lra.examples import Sequences
    >>> examples = MaskedExamples(Examples((Sequences.of([b"abcdef"]),), np.array([0])), share=0.5, seed=1)
    >>> examples[0, 0]["input_ids"], examples[0, 0]["labels"]
    (tensor([[ 98,  99,   0, 101,   0,   0]]), tensor([[-100, -100,  100, -100,  102,  103]]))
    """

    examples: Examples
    share: float
    """Of tokens, that are masked on average."""
    seed: int

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def lengths(self) -> np.ndarray:
        return self.examples.lengths

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Tensor]:
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[int | tuple[int, int]]) -> dict[str, Tensor]:
        """A batch of examples by their keys: (epoch, index), or the index alone."""
        pairs = [key if isinstance(key, tuple) else (0, key) for key in keys]
        batch = self.examples.batch([index for _, index in pairs])
        ids = batch["input_ids"]
        masked = torch.from_numpy(np.stack([self._draw(*pair, ids[0].shape) for pair in pairs]))
        masked &= batch.get("attention_mask", True)
        labels = torch.where(masked, ids, UNMASKED)
        return batch | {"input_ids": torch.where(masked, MASK, ids), "labels": labels}

    def _draw(self, epoch: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
        # Column by column, so that how far a batch is padded changes nothing.
        return self.share > np.random.default_rng([self.seed, epoch, index]).random(shape[::-1]).T
