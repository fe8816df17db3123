"""Words, positions and token types become vectors."""

import torch
from torch import Tensor, nn

from nystromformer.attention.checks import shape_of
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.encoder.dropout import Dropout


class NystromformerEmbeddings(nn.Module):
    def __init__(self, config: NystromformerConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.max_length, self.offset = config.max_position_embeddings, config.position_offset
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(self.max_length + self.offset, width)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width) if config.type_vocab_size else None
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps) if config.embedding_norm else None
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        words = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds  # (b n d)
        length, device = words.shape[1], words.device
        if position_ids is None:
            self.check_length(length)
            position_ids = torch.arange(self.offset, self.offset + length, device=device).unsqueeze(0)
        added = self.position_embeddings(position_ids)  # (1 n d): the same for the whole batch, unless given
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(1, 1, dtype=torch.long, device=device)
            added = added + self.token_type_embeddings(token_type_ids)
        elif token_type_ids is not None:
            raise ValueError(
                f"token_type_ids of shape {shape_of(token_type_ids)} were given to a model without token types "
                f"(type_vocab_size=0): leave them out, with tokenizer(..., return_token_type_ids=False)."
            )
        hidden = words + added
        return self.dropout(hidden if self.LayerNorm is None else self.LayerNorm(hidden))

    def check_length(self, length: int) -> None:
        if length > self.max_length:
            raise ValueError(
                f"length {length}: the position table has room for {self.max_length} tokens; shorten the input with "
                f"tokenizer(..., truncation=True, max_length={self.max_length}), or lengthen the table with "
                f"model.resize_position_embeddings({length}) or `nystromformer convert SRC DST --max-length {length}`."
            )
