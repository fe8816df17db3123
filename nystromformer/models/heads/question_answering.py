"""`NystromformerForQuestionAnswering`: where in the text an answer starts and ends."""

from torch import Tensor, nn
from transformers.modeling_outputs import QuestionAnsweringModelOutput
from transformers.utils import can_return_tuple

from nystromformer.models.base import NystromformerPreTrainedModel
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.heads.losses import IGNORED, cross_entropy_tally
from nystromformer.models.model import NystromformerModel


class NystromformerForQuestionAnswering(NystromformerPreTrainedModel):
    """Extractive question answering.

    >>> import torch
    >>> config = NystromformerConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64)
    >>> out = NystromformerForQuestionAnswering(config)(torch.randint(5, 100, (2, 300)))
    >>> out.start_logits.shape, out.end_logits.shape
    (torch.Size([2, 300]), torch.Size([2, 300]))
    """

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__(config)
        self.nystromformer = NystromformerModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> QuestionAnsweringModelOutput:
        """`start_positions` and `end_positions` (b,) are token indices; those outside the input are left out."""
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
        start_logits, end_logits = self.qa_outputs(encoded.last_hidden_state).unbind(dim=-1)  # (b n) each
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (position_loss(start_logits, start_positions) + position_loss(end_logits, end_positions)) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )


def position_loss(logits: Tensor, positions: Tensor) -> Tensor:
    positions = positions.view(-1)
    outside = (positions < 0) | (positions >= logits.shape[1])  # cut off with the end of a long text
    return cross_entropy_tally(logits, positions.masked_fill(outside, IGNORED)).mean()
