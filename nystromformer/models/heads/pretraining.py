"""`NystromformerForPreTraining`: masked words and sentence order (ALBERT's SOP), the paper's objective."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput, can_return_tuple

from nystromformer.models.base import NystromformerPreTrainedModel
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.heads.losses import IGNORED, Tally, cross_entropy_tally
from nystromformer.models.heads.prediction import TIED, PreTrainingHeads
from nystromformer.models.model import NystromformerModel


@dataclass
class NystromformerForPreTrainingOutput(ModelOutput):
    """`loss` is the sum of both objectives' means. The sums, counts and numbers of right answers behind it add up over
    batches and processes to exact means and accuracies."""

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    mlm_loss_sum: Tensor | None = None
    mlm_count: Tensor | None = None
    mlm_correct: Tensor | None = None
    sop_loss_sum: Tensor | None = None
    sop_count: Tensor | None = None
    sop_correct: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class NystromformerForPreTraining(NystromformerPreTrainedModel):
    """Masked language model and sentence-order classifier.

    >>> config = NystromformerConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64)
    >>> model, ids = NystromformerForPreTraining(config), torch.randint(5, 100, (2, 300))
    >>> labels = torch.where(torch.arange(300) % 7 == 0, ids, -100)
    >>> out = model(ids, labels=labels, sentence_order_label=torch.tensor([0, 1]))
    >>> int(out.mlm_count), int(out.sop_count)
    (86, 2)
    """

    _tied_weights_keys = TIED
    accepts_loss_kwargs = True  # HF Trainer passes num_items_in_batch

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__(config)
        self.nystromformer = NystromformerModel(config)
        self.cls = PreTrainingHeads(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    @staticmethod
    def count_items(batches: Iterable[Mapping[str, Tensor]]) -> Tensor:
        """What both objectives count in the batches of one optimizer step: (masked tokens, pairs).

        The pair is what `forward` takes as `num_items_in_batch`, summed over processes where there are several. In a
        subclass of HF Trainer, return it from `_get_num_items_in_batch`.
        """
        counts = [
            torch.stack([(batch[name] != IGNORED).sum() for name in ("labels", "sentence_order_label")])
            for batch in batches
        ]
        return torch.stack(counts).sum(dim=0)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        sentence_order_label: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        output_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> NystromformerForPreTrainingOutput:
        """`labels` (b, n) are -100 except at masked tokens; `sentence_order_label` (b,) is 0 for segments in order, 1
        for swapped ones, -100 for examples that are no pair. `output_logits`: see `NystromformerForMaskedLM`.

        Each objective is divided by its own count: that of this batch or, with a pair of numbers from `count_items` as
        `num_items_in_batch`, that of all batches of an optimizer step. HF Trainer by itself passes only the number of
        masked tokens; see `combined_loss`.
        """
        encoded = self.nystromformer(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        hidden, head = encoded.last_hidden_state, self.cls.predictions
        order_logits = self.cls.seq_relationship(encoded.pooler_output)
        mlm = None if labels is None else head.tally(hidden, labels)
        sop = None if sentence_order_label is None else cross_entropy_tally(order_logits, sentence_order_label)
        wants_logits = labels is None if output_logits is None else output_logits
        return NystromformerForPreTrainingOutput(
            loss=combined_loss(mlm, sop, num_items_in_batch),
            prediction_logits=head(hidden) if wants_logits else None,
            seq_relationship_logits=order_logits,
            **{} if mlm is None else {f"mlm_{name}": value.detach() for name, value in mlm._asdict().items()},
            **{} if sop is None else {f"sop_{name}": value.detach() for name, value in sop._asdict().items()},
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )


def combined_loss(mlm: Tally | None, sop: Tally | None, num_items: Tensor | int | None) -> Tensor | None:
    """MLM mean + SOP mean, whichever were given.

    `num_items` of two numbers holds both denominators, and gradients accumulated over any split into batches equal
    those of one large batch. One number (HF Trainer's own count) is MLM's denominator. How many pairs the other batches
    hold is then unknown, so this batch's SOP mean is weighted by its share of the masked tokens: weights that add up
    to 1 over the accumulated batches, and a gradient that is right up to the batches' uneven numbers of masked tokens.
    """
    if num_items is None or (mlm is None and not _is_pair(num_items)):
        means = [tally.mean() for tally in (mlm, sop) if tally is not None]
    elif _is_pair(num_items):
        counted = zip((mlm, sop), num_items, strict=True)
        means = [tally.mean(count) for tally, count in counted if tally is not None]
    else:
        means = [mlm.mean(num_items)] + ([] if sop is None else [sop.mean() * mlm.count / num_items])
    return sum(means[1:], start=means[0]) if means else None


def _is_pair(num_items: Tensor | int) -> bool:
    return isinstance(num_items, Tensor) and num_items.numel() == 2
