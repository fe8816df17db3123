"""Attention as modules of PyTorch and of image models write it, without a name that Transformers knows."""

import torch
from torch import nn
from torch.nn import functional


class SelfAttention(nn.Module):
    """Attention as in most image models: one projection, a call of SDPA."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.fused = heads, True
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, attn_mask=None, is_causal=False, dropout=0.0):
        batch, length, width = x.shape
        query, key, value = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = attend(self, query, key, value, attn_mask, is_causal, dropout)
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))


def attend(module, query, key, value, attn_mask, is_causal, dropout):
    if module.fused:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout
        )
    return (query @ key.mT * query.shape[3] ** -0.5).softmax(dim=-1) @ value


class CrossAttention(SelfAttention):
    def forward(self, x, context, attn_mask=None):
        query, key = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (x, context))
        return functional.scaled_dot_product_attention(query, key, key, attn_mask=attn_mask)


def by_hand(module, x, attention, **options):
    query, key, value = module.qkv(x).unflatten(2, (3, module.heads, -1)).permute(2, 0, 3, 1, 4)
    return module.proj(attention(query, key, value, **options).transpose(1, 2).flatten(2))


def torch_encoder(batch_first, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=batch_first, **options)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=batch_first).eval()


def padding(length=100, short=60):
    """True for padding, as PyTorch's modules take it."""
    return torch.arange(length) >= torch.tensor([[length], [short]])
