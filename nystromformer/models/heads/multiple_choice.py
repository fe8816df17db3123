"""`NystromformerForMultipleChoice`: which of several continuations fits."""

from torch import Tensor, nn
from transformers.modeling_outputs import MultipleChoiceModelOutput
from transformers.utils import can_return_tuple

from nystromformer.attention.checks import shape_of
from nystromformer.models.base import NystromformerPreTrainedModel
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.heads.losses import cross_entropy_tally
from nystromformer.models.model import NystromformerModel


class NystromformerForMultipleChoice(NystromformerPreTrainedModel):
    """Multiple choice: every input has an axis of choices behind the batch.

    >>> import torch
    >>> config = NystromformerConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64)
    >>> NystromformerForMultipleChoice(config)(torch.randint(5, 100, (2, 4, 100))).logits.shape
    torch.Size([2, 4])
    """

    accepts_loss_kwargs = True  # HF Trainer passes num_items_in_batch

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__(config)
        self.nystromformer = NystromformerModel(config, add_pooling_layer=False)
        self.pre_classifier = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> MultipleChoiceModelOutput:
        """Inputs are (b, choices, n); `labels` (b,) is the index of the right choice."""
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is None or given.dim() != (3 if inputs_embeds is None else 4):
            shape = "nothing" if given is None else shape_of(given)
            raise ValueError(
                f"the input is {shape}: must be input_ids (b, choices, n) or inputs_embeds (b, choices, n, d)."
            )
        choices = given.shape[1]
        encoded = self.nystromformer(
            input_ids=_flat(input_ids),
            attention_mask=_flat(attention_mask),
            token_type_ids=_flat(token_type_ids),
            position_ids=_flat(position_ids),
            inputs_embeds=_flat(inputs_embeds),
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        scores = self.classifier(self.pre_classifier(encoded.pooler_output).relu())  # (b·choices 1)
        logits = scores.view(-1, choices)
        return MultipleChoiceModelOutput(
            loss=None if labels is None else cross_entropy_tally(logits, labels).mean(num_items_in_batch),
            logits=logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.flatten(0, 1)
