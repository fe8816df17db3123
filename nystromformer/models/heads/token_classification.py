"""`NystromformerForTokenClassification`: a label for each token."""

from torch import Tensor, nn
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils import can_return_tuple

from nystromformer.models.base import NystromformerPreTrainedModel
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.heads.losses import cross_entropy_tally
from nystromformer.models.model import NystromformerModel


class NystromformerForTokenClassification(NystromformerPreTrainedModel):
    """Classifier of tokens.

    >>> import torch
    >>> config = NystromformerConfig(
    ...     hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64, num_labels=5
    ... )
    >>> NystromformerForTokenClassification(config)(torch.randint(5, 100, (2, 300))).logits.shape
    torch.Size([2, 300, 5])
    """

    accepts_loss_kwargs = True  # HF Trainer passes num_items_in_batch

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__(config)
        self.nystromformer = NystromformerModel(config, add_pooling_layer=False)
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
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
    ) -> TokenClassifierOutput:
        """`labels` (b, n) are classes, -100 for tokens that don't count."""
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
        logits = self.classifier(self.dropout(encoded.last_hidden_state))
        return TokenClassifierOutput(
            loss=None if labels is None else cross_entropy_tally(logits, labels).mean(num_items_in_batch),
            logits=logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
