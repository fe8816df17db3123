"""Self-pretraining on Long Range Arena: the encoder of a task tells masked tokens of its input."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput, can_return_tuple

from nystromformer.attention.common import shape_of
from nystromformer.models.losses import IGNORED, Count, cross_entropy_tally
from nystromformer.models.lra import LongRangeArenaConfig
from nystromformer.models.model import NystromformerModel, NystromformerPreTrainedModel


@dataclass
class MaskedTokensOutput(ModelOutput):
    """`correct` and `masked` (b,), in evaluation, count the right answers and the questions of each example."""

    loss: Tensor | None = None
    correct: Tensor | None = None
    masked: Tensor | None = None


class NystromformerForMaskedTokens(NystromformerPreTrainedModel):
    """Encoder and one layer from each masked token to the vocabulary.

    >>> from nystromformer.models.lra import lra_config
    >>> model = NystromformerForMaskedTokens(lra_config(vocab_size=257, max_position_embeddings=512)).eval()
    >>> ids = torch.randint(1, 257, (2, 300))
    >>> hidden = torch.arange(300) % 2 == 0
    >>> out = model(torch.where(hidden, 0, ids), labels=torch.where(hidden, ids, -100))
    >>> out.loss.shape, out.masked
    (torch.Size([]), tensor([150, 150]))
    """

    config: LongRangeArenaConfig
    config_class = LongRangeArenaConfig
    accepts_loss_kwargs = True  # HF Trainer passes num_items_in_batch

    def __init__(self, config: LongRangeArenaConfig) -> None:
        super().__init__(config)
        self.nystromformer = NystromformerModel(config, add_pooling_layer=False)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
        num_items_in_batch: Count = None,
    ) -> MaskedTokensOutput:  # fmt: skip
        """`input_ids` (b, n), or (b, 2, n) of pairs, with the masked tokens replaced; `labels` alike: what these were,
        -100 elsewhere. The others never meet the vocabulary."""
        if labels is None or labels.shape != input_ids.shape:
            given = "none" if labels is None else shape_of(labels)
            raise ValueError(
                f"labels: {given} given; must be {shape_of(input_ids)} like input_ids, -100 where not masked."
            )
        pairs = input_ids.dim() == 3
        ids, mask = (x.flatten(0, 1) if pairs and x is not None else x for x in (input_ids, attention_mask))
        hidden = self.nystromformer(ids, mask, return_dict=True).last_hidden_state.flatten(0, 1)
        chosen = (labels.flatten() != IGNORED).nonzero()[:, 0]
        answers = labels.flatten().index_select(0, chosen)
        logits = self.decoder(hidden.index_select(0, chosen))  # (masked, vocabulary)
        tally = cross_entropy_tally(logits, answers)
        if self.training:
            return MaskedTokensOutput(loss=tally.mean(num_items_in_batch))
        example = chosen // (labels.numel() // len(labels))
        none = torch.zeros(len(labels), dtype=torch.long, device=labels.device)
        return MaskedTokensOutput(
            loss=tally.mean(num_items_in_batch),
            correct=none.index_add(0, example, (logits.argmax(dim=-1) == answers).long()),
            masked=none.index_add(0, example, torch.ones_like(example)),
        )
