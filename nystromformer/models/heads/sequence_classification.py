"""`NystromformerForSequenceClassification`: one label, several labels or numbers for a whole sequence."""

from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import can_return_tuple

from nystromformer.models.activations import activation
from nystromformer.models.base import NystromformerPreTrainedModel
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.heads.losses import sequence_loss
from nystromformer.models.model import NystromformerModel


class ClassificationHead(nn.Module):
    """Two layers on the pooled vector. BERT's pooler and classifier, RoBERTa's head and LRA's are all of this form."""

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        size = config.classifier_size or config.hidden_size
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dense = nn.Linear(config.hidden_size, size)
        self.activation = activation(config.classifier_activation or config.hidden_act)
        self.out_proj = nn.Linear(size, config.num_labels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, pooled: Tensor) -> Tensor:
        return self.out_proj(self.dropout(self.activation(self.dense(self.dropout(pooled)))))


class NystromformerForSequenceClassification(NystromformerPreTrainedModel):
    """Classifier or regressor of sequences.

    >>> import torch
    >>> config = NystromformerConfig(
    ...     hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64, num_labels=3
    ... )
    >>> model = NystromformerForSequenceClassification(config)
    >>> model(torch.randint(5, 100, (2, 300)), labels=torch.tensor([0, 2])).logits.shape
    torch.Size([2, 3])
    """

    accepts_loss_kwargs = True  # HF Trainer passes num_items_in_batch

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__(config)
        self.nystromformer = NystromformerModel(config, add_pooling_layer=False)
        self.classifier = ClassificationHead(config)
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
    ) -> SequenceClassifierOutput:
        """`labels`: classes (b,), several labels (b, labels) of 0.0 and 1.0, or numbers; see `sequence_loss`."""
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
        logits = self.classifier(encoded.pooler_output)
        return SequenceClassifierOutput(
            loss=None if labels is None else sequence_loss(logits, labels, self.config, num_items_in_batch),
            logits=logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
