"""`NystromformerForMaskedLM`: which word stood here."""

from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import can_return_tuple

from nystromformer.models.base import NystromformerPreTrainedModel
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.heads.prediction import TIED, MaskedLMHead
from nystromformer.models.model import NystromformerModel


class NystromformerForMaskedLM(NystromformerPreTrainedModel):
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

    _tied_weights_keys = TIED
    accepts_loss_kwargs = True  # HF Trainer passes num_items_in_batch
    _keys_to_ignore_on_load_unexpected = (r"cls\.seq_relationship\.",)  # of checkpoints from pretraining

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__(config)
        self.nystromformer = NystromformerModel(config, add_pooling_layer=False)
        self.cls = MaskedLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

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
        output_logits: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> MaskedLMOutput:
        """`labels` (b, n) are -100 except at masked tokens. With labels the vocabulary's logits, the largest tensor of
        the model, are computed at those tokens only and not returned, unless `output_logits=True`.
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
        wants_logits = labels is None if output_logits is None else output_logits
        return MaskedLMOutput(
            loss=None if labels is None else head.tally(hidden, labels).mean(num_items_in_batch),
            logits=head(hidden) if wants_logits else None,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
