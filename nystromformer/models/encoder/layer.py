"""One layer of the encoder: attention and feed-forward, each with a residual connection and a LayerNorm.

Names are those of BERT and of the Hub's checkpoints, whether the LayerNorm comes behind ("post") or before ("pre").
"""

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from nystromformer.models.activations import activation
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.encoder.dropout import Dropout
from nystromformer.models.encoder.self_attention import NystromformerSelfAttention


class NystromformerOutput(nn.Module):
    """The end of a sublayer: dense layer, dropout, residual connection; and the sublayer's LayerNorm."""

    def __init__(self, config: NystromformerConfig, input_size: int) -> None:
        super().__init__()
        self.pre_norm = config.norm == "pre"
        self.dense = nn.Linear(input_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def sublayer_input(self, hidden: Tensor) -> Tensor:
        return self.LayerNorm(hidden) if self.pre_norm else hidden

    def forward(self, update: Tensor, hidden: Tensor) -> Tensor:
        out = hidden + self.dropout(self.dense(update))
        return out if self.pre_norm else self.LayerNorm(out)


class NystromformerAttentionBlock(nn.Module):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.self = NystromformerSelfAttention(config)
        self.output = NystromformerOutput(config, config.hidden_size)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        update, weights = self.self(self.output.sublayer_input(hidden), mask, output_attentions)
        return self.output(update, hidden), weights


class NystromformerIntermediate(nn.Module):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = activation(config.hidden_act)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.activation(self.dense(hidden))


class NystromformerLayer(GradientCheckpointingLayer):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.attention = NystromformerAttentionBlock(config)
        self.intermediate = NystromformerIntermediate(config)
        self.output = NystromformerOutput(config, config.intermediate_size)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        hidden, weights = self.attention(hidden, mask, output_attentions)
        return self.output(self.intermediate(self.output.sublayer_input(hidden)), hidden), weights
