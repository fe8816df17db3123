"""The masked-language-model head, computed only where a token was masked."""

import torch
from torch import Tensor, nn

from nystromformer.attention.checks import shape_of
from nystromformer.models.activations import activation
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.heads.losses import IGNORED, Tally, cross_entropy_tally

TIED = {
    "cls.predictions.decoder.weight": "nystromformer.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
"""Parameters of models with this head that are one and the same, and saved once."""


class PredictionTransform(nn.Module):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.LayerNorm(self.activation(self.dense(hidden)))


class PredictionHead(nn.Module):
    """Hidden states (..., hidden) → logits over the vocabulary (..., vocabulary)."""

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.transform = PredictionTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))  # the name that checkpoints have for decoder.bias

    def forward(self, hidden: Tensor) -> Tensor:
        return self.decoder(self.transform(hidden))

    def tally(self, hidden: Tensor, labels: Tensor) -> Tally:
        """The loss at the positions whose label is not -100; the others never meet the vocabulary.

        `hidden` is (b, n, hidden), `labels` (b, n). With 15 % of the tokens masked that is 15 % of the head's work.
        """
        if labels.shape != hidden.shape[:2]:
            raise ValueError(
                f"labels have shape {shape_of(labels)}: must be {tuple(hidden.shape[:2])}, one for each token."
            )
        chosen = (labels.flatten() != IGNORED).nonzero()[:, 0]
        logits = self(hidden.flatten(0, 1).index_select(0, chosen))  # (masked, vocabulary)
        return cross_entropy_tally(logits, labels.flatten().index_select(0, chosen))


class MaskedLMHead(nn.Module):
    """What checkpoints call `cls`."""

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.predictions = PredictionHead(config)


class PreTrainingHeads(MaskedLMHead):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)
