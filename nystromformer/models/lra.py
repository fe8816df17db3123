"""The paper's classifier for Long Range Arena, of one sequence or of a pair."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from nystromformer.attention.common import shape_of
from nystromformer.checks import check_at_least
from nystromformer.models.configuration import PRESETS, NystromformerConfig
from nystromformer.models.encoder import activation
from nystromformer.models.losses import Count, sequence_loss
from nystromformer.models.model import NystromformerModel, NystromformerPreTrainedModel


class LongRangeArenaConfig(NystromformerConfig):
    """`lra_config` gives the paper's sizes."""

    pair: bool = False
    """Classify two sequences, encoded alike."""
    pooled_length: int | None = None
    """Divide the sum over tokens by this length instead of their number, as the release does with padded ones."""

    def check(self) -> None:
        super().check()
        if self.pooled_length is not None:
            check_at_least("pooled_length", self.pooled_length, 1)


def lra_config(**changes: Any) -> LongRangeArenaConfig:
    """The paper's model, with some fields changed.

    >>> config = lra_config(attention="standard", vocab_size=32, max_position_embeddings=2048, num_labels=10)
    >>> config.hidden_size, config.num_hidden_layers, config.norm
    (64, 2, 'pre')
    """
    return LongRangeArenaConfig(**PRESETS["lra"] | changes)


class NystromformerForLongRangeArena(NystromformerPreTrainedModel):
    """Encoder, mean of the tokens, two layers.

    >>> model = NystromformerForLongRangeArena(lra_config(pair=True, num_labels=2))
    >>> model(torch.randint(1, 100, (3, 2, 300))).logits.shape
    torch.Size([3, 2])
    """

    config: LongRangeArenaConfig
    config_class = LongRangeArenaConfig
    accepts_loss_kwargs = True  # HF Trainer passes num_items_in_batch

    def __init__(self, config: LongRangeArenaConfig) -> None:
        super().__init__(config)
        self.nystromformer = NystromformerModel(config, add_pooling_layer=False)
        width = config.classifier_size or config.hidden_size
        self.dense = nn.Linear(config.hidden_size * (4 if config.pair else 1), width)
        self.activation = activation(config.classifier_activation or config.hidden_act)
        self.out_proj = nn.Linear(width, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Count = None,
    ) -> SequenceClassifierOutput:
        """`input_ids` (b, n), or (b, 2, n) of pairs; `attention_mask` alike, True for tokens; `labels` (b,)."""
        dims = 3 if self.config.pair else 2
        if input_ids.dim() != dims or (self.config.pair and input_ids.shape[1] != 2):
            expected = "(batch, 2, length)" if self.config.pair else "(batch, length)"
            raise ValueError(
                f"input_ids has shape {shape_of(input_ids)}: must be {expected}, since pair={self.config.pair}."
            )
        if self.config.pair:
            both = self.pooled(
                input_ids.flatten(0, 1), None if attention_mask is None else attention_mask.flatten(0, 1)
            )
            first, second = both.unflatten(0, (-1, 2)).unbind(dim=1)  # (b d)
            pooled = torch.cat((first, second, first * second, first - second), dim=1)  # (b 4d)
        else:
            pooled = self.pooled(input_ids, attention_mask)
        logits = self.out_proj(self.activation(self.dense(pooled)))
        loss = None if labels is None else sequence_loss(logits, labels, self.config, num_items_in_batch)
        return SequenceClassifierOutput(loss=loss, logits=logits)

    def pooled(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """(b, n) → (b, d)"""
        mean = self.nystromformer(input_ids, attention_mask, return_dict=True).pooler_output
        if self.config.pooled_length is None:
            return mean
        tokens = input_ids.shape[1] if attention_mask is None else attention_mask.sum(dim=1, keepdim=True)
        return mean * tokens / self.config.pooled_length
