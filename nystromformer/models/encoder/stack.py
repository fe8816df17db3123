"""The layers one after another."""

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.encoder.layer import NystromformerLayer


class NystromformerEncoder(nn.Module):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(NystromformerLayer(config) for _ in range(config.num_hidden_layers))
        # with the LayerNorms before the sublayers nothing has normalised the last sum yet
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if config.norm == "pre" else None

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
    ) -> BaseModelOutput:
        """`hidden_states` are the embeddings and each layer's output; the last of them is `last_hidden_state`."""
        states, maps = [], []
        for layer in self.layer:
            if output_hidden_states:
                states.append(hidden)
            hidden, weights = layer(hidden, mask, output_attentions)
            if output_attentions:
                maps.append(weights)
        hidden = hidden if self.norm is None else self.norm(hidden)
        return BaseModelOutput(
            last_hidden_state=hidden,
            hidden_states=(*states, hidden) if output_hidden_states else None,
            attentions=tuple(maps) if output_attentions else None,
        )
