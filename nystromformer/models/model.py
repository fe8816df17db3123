"""`NystromformerModel`: the encoder without a head."""

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import can_return_tuple

from nystromformer.attention.checks import shape_of
from nystromformer.models.base import NystromformerPreTrainedModel
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.encoder import NystromformerEmbeddings, NystromformerEncoder
from nystromformer.models.masks import token_mask
from nystromformer.models.pooling import NystromformerPooler, pool


class NystromformerModel(NystromformerPreTrainedModel):
    """Embeddings, encoder and pooled vector.

    >>> import torch
    >>> config = NystromformerConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64)
    >>> out = NystromformerModel(config)(torch.randint(5, 100, (2, 300)))
    >>> out.last_hidden_state.shape, out.pooler_output.shape
    (torch.Size([2, 300, 32]), torch.Size([2, 32]))
    """

    def __init__(self, config: NystromformerConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = NystromformerEmbeddings(config)
        self.encoder = NystromformerEncoder(config)
        has_pooler = config.add_pooler and add_pooling_layer
        self.pooler = NystromformerPooler(config.hidden_size) if has_pooler else None
        if not has_pooler:
            self._keys_to_ignore_on_load_unexpected = [r"(^|\.)pooler\."]
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings.word_embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPooling:
        """Encode `input_ids` (b, n) or `inputs_embeds` (b, n, hidden).

        `attention_mask` (b, n) is 1 for real tokens, anywhere. `position_ids` are rows of the position table; by
        default token i has row `position_offset` + i, wherever the padding stands. `pooler_output` is the first real
        token or the mean of the real tokens (`config.pooling`), through the pooler where the model has one.
        `output_attentions` gives whole matrices, for at most 1,024 tokens.
        """
        batch, length = self._check_input(input_ids, inputs_embeds)
        if input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        mask = token_mask(attention_mask, batch, length)
        encoded = self.encoder(
            self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds),
            mask,
            self.config.output_attentions if output_attentions is None else output_attentions,
            self.config.output_hidden_states if output_hidden_states is None else output_hidden_states,
        )
        pooled = pool(encoded.last_hidden_state, mask, self.config.pooling)
        return BaseModelOutputWithPooling(
            last_hidden_state=encoded.last_hidden_state,
            pooler_output=pooled if self.pooler is None else self.pooler(pooled),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )

    def _check_input(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
        """Batch and length of the one input that must be given."""
        if (input_ids is None) == (inputs_embeds is None):
            given = "neither" if input_ids is None else "both"
            raise ValueError(f"input_ids and inputs_embeds: {given} given; give exactly one of them.")
        if input_ids is not None:
            if input_ids.dim() != 2 or input_ids.shape[1] < 1:
                raise ValueError(
                    f"input_ids has shape {shape_of(input_ids)}: must be (batch, length), length at least 1."
                )
            return input_ids.shape[0], input_ids.shape[1]
        width = self.config.hidden_size
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[1] < 1 or inputs_embeds.shape[2] != width:
            raise ValueError(f"inputs_embeds has shape {shape_of(inputs_embeds)}: must be (batch, length, {width}).")
        return inputs_embeds.shape[0], inputs_embeds.shape[1]
