"""Models with the heads of pretraining: masked words, and sentence order beside them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling as Encoding
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import ModelOutput

from nystromformer.attention.shared.common import shape_of
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.encoder import activation
from nystromformer.models.heads import IGNORED, Count, NystromformerWithHead, Tally, cross_entropy_tally, on_encoding

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
        self.seq_relationship: nn.Module = nn.Linear(config.hidden_size, 2)


class PredictsWords(NystromformerWithHead):
    """What models with a head over the vocabulary share."""

    _tied_weights_keys = TIED
    cls: Any  # `MaskedLMHead`, or one with more in it

    def get_output_embeddings(self) -> nn.Linear:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias


class NystromformerForMaskedLM(PredictsWords):
    """Masked language model.

    >>> import torch
    >>> config = NystromformerConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64)
    >>> model, ids = NystromformerForMaskedLM(config), torch.randint(5, 100, (2, 300))
    >>> model(ids).logits.shape
    torch.Size([2, 300, 30000])
    >>> out = model(ids, labels=torch.where(torch.rand(ids.shape) < 0.15, ids, -100))
    >>> out.loss.shape, out.logits
    (torch.Size([]), None)
    """

    _keys_to_ignore_on_load_unexpected = (r"cls\.seq_relationship\.",)  # of checkpoints from pretraining

    def add_head(self, config: NystromformerConfig) -> None:
        self.cls = MaskedLMHead(config)

    @on_encoding
    def forward(
        self, encoding: Encoding, *, labels: Tensor | None = None, output_logits: bool | None = None,
        num_items_in_batch: Count = None,
    ) -> MaskedLMOutput:  # fmt: skip
        """`labels` (b, n) are -100 except at masked tokens.

        In training with labels, the vocabulary's logits, the largest tensor of the model, are computed at those tokens
        only and not returned. `output_logits` decides otherwise, in training and in evaluation.
        """
        hidden, head = encoding.last_hidden_state, self.cls.predictions
        wants_logits = labels is None or not self.training if output_logits is None else output_logits
        return MaskedLMOutput(
            loss=None if labels is None else head.tally(hidden, labels).mean(num_items_in_batch),
            logits=head(hidden) if wants_logits else None,
        )


@dataclass
class NystromformerForPreTrainingOutput(ModelOutput):
    """`loss` is the sum of both objectives' means. The sums, counts and numbers of right answers that it is made of add
    up over batches and processes to exact means and accuracies."""

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


class NystromformerForPreTraining(PredictsWords):
    """Masked language model and sentence-order classifier.

    >>> config = NystromformerConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64)
    >>> model, ids = NystromformerForPreTraining(config), torch.randint(5, 100, (2, 300))
    >>> labels = torch.where(torch.arange(300) % 7 == 0, ids, -100)
    >>> out = model(ids, labels=labels, sentence_order_label=torch.tensor([0, 1]))
    >>> int(out.mlm_count), int(out.sop_count)
    (86, 2)
    """

    has_pooling_layer = True

    def add_head(self, config: NystromformerConfig) -> None:
        self.cls = PreTrainingHeads(config)

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

    @on_encoding
    def forward(
        self, encoding: Encoding, *, labels: Tensor | None = None, sentence_order_label: Tensor | None = None,
        output_logits: bool | None = None, num_items_in_batch: Count = None,
    ) -> NystromformerForPreTrainingOutput:  # fmt: skip
        """`labels` (b, n) are -100 except at masked tokens; `sentence_order_label` (b,) is 0 for segments in order, 1
        for swapped ones, -100 for examples that are no pair. With labels the vocabulary's logits are returned only with
        `output_logits=True`: sums, counts and right answers say more, and add up over batches.

        Each objective is divided by its own count: that of this batch or, with a pair of numbers from `count_items` as
        `num_items_in_batch`, that of all batches of an optimizer step. HF Trainer by itself passes only the number of
        masked tokens; see `combined_loss`.
        """
        hidden, head = encoding.last_hidden_state, self.cls.predictions
        order_logits = self.cls.seq_relationship(encoding.pooler_output)
        mlm = None if labels is None else head.tally(hidden, labels)
        sop = None if sentence_order_label is None else cross_entropy_tally(order_logits, sentence_order_label)
        wants_logits = labels is None if output_logits is None else output_logits
        return NystromformerForPreTrainingOutput(
            loss=combined_loss(mlm, sop, num_items_in_batch),
            prediction_logits=head(hidden) if wants_logits else None,
            seq_relationship_logits=order_logits,
            **{} if mlm is None else {f"mlm_{name}": value.detach() for name, value in vars(mlm).items()},
            **{} if sop is None else {f"sop_{name}": value.detach() for name, value in vars(sop).items()},
        )


def combined_loss(mlm: Tally | None, sop: Tally | None, num_items: Count) -> Tensor | None:
    """MLM mean + SOP mean, whichever were given.

    `num_items` of two numbers holds both denominators, and gradients accumulated over any split into batches equal
    those of one large batch. One number (HF Trainer's own count) is MLM's denominator. How many pairs the other batches
    hold is then unknown, so this batch's SOP mean is weighted by its share of the masked tokens: weights that add up
    to 1 over the accumulated batches, and a gradient that is right up to the batches' uneven numbers of masked tokens.
    """
    if isinstance(num_items, Tensor) and num_items.numel() == 2:
        counted = zip((mlm, sop), num_items, strict=True)
        means = [tally.mean(count) for tally, count in counted if tally is not None]
    elif num_items is None or mlm is None:
        means = [tally.mean() for tally in (mlm, sop) if tally is not None]
    else:
        means = [mlm.mean(num_items)] + ([] if sop is None else [sop.mean() * mlm.count / num_items])
    return sum(means[1:], start=means[0]) if means else None
