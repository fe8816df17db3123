"""Projections around any attention of `build_attention`."""

from torch import Tensor, nn

from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.encoder.attention_maps import attention_map


class NystromformerSelfAttention(nn.Module):
    """Queries, keys and values from (b, n, hidden), and the attention that `config.attention` names."""

    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim, width = config.num_attention_heads, config.head_dim, config.hidden_size
        self.attention = config.build_attention()
        self.query = nn.Linear(width, width)
        # an attention that takes its queries as keys would leave a projection without gradient, which DDP refuses
        self.key = None if self.attention.shares_query_key else nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self._adopt_convolution()

    def _adopt_convolution(self) -> None:
        """Published checkpoints hold the convolution beside the projections, as `attention.self.conv.weight`.

        So it becomes a child of this module, and the attention keeps a plain reference to the same module.
        """
        if "conv" in self.attention._modules:
            self.conv = self.attention._modules.pop("conv")
            self.attention.__dict__["conv"] = self.conv

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, output_attentions: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(b, n, hidden) → the same, and the attention matrix (b, h, n, n) on request."""
        query = self._split_heads(self.query(hidden))
        key = query if self.key is None else self._split_heads(self.key(hidden))
        value = self._split_heads(self.value(hidden))
        weights = attention_map(self.attention, query, key, mask) if output_attentions else None
        context = self.attention(query, key, value, mask)
        return context.transpose(1, 2).flatten(2), weights

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)  # (b h n d)
