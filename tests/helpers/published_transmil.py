"""TransMIL (Shao et al., 2021) as published, written down from its description, as an oracle.

A linear layer to 512 features, the first tiles again until their number is a square, a class token, attention, three
depthwise convolutions over the square, attention, and a classifier of the class token. Names of the parts are those of
the published state dicts.
"""

import math

import torch
from torch import Tensor, nn


class PositionConvolutions(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj, self.proj1, self.proj2 = (nn.Conv2d(dim, dim, k, padding=k // 2, groups=dim) for k in (7, 5, 3))

    def forward(self, tokens: Tensor, side: int) -> Tensor:
        image = tokens[:, 1:].transpose(1, 2).unflatten(2, (side, side))
        image = image + self.proj(image) + self.proj1(image) + self.proj2(image)
        return torch.cat([tokens[:, :1], image.flatten(2).transpose(1, 2)], dim=1)


class Layer(nn.Module):
    def __init__(self, attention_class: type, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attn = attention_class(
            dim=dim,
            dim_head=dim // 8,
            heads=8,
            num_landmarks=dim // 2,
            pinv_iterations=6,
            residual=True,
            dropout=0.1,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.attn(self.norm(tokens))


class PublishedTransMIL(nn.Module):
    def __init__(self, attention_class: type, n_classes: int = 2, features: int = 1024, dim: int = 512) -> None:
        super().__init__()
        self.pos_layer = PositionConvolutions(dim)
        self._fc1 = nn.Sequential(nn.Linear(features, dim), nn.ReLU())
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.layer1, self.layer2 = Layer(attention_class, dim), Layer(attention_class, dim)
        self.norm = nn.LayerNorm(dim)
        self._fc2 = nn.Linear(dim, n_classes)

    def forward(self, data: Tensor) -> Tensor:
        return self._fc2(self.norm(self.layer2(self.second_tokens(data)))[:, 0])

    def second_tokens(self, data: Tensor) -> Tensor:
        """What the second layer reads."""
        tiles = self._fc1(data)
        side = math.ceil(math.sqrt(tiles.shape[1]))
        tiles = torch.cat([tiles, tiles[:, : side**2 - tiles.shape[1]]], dim=1)
        tokens = torch.cat([self.cls_token.expand(len(tiles), -1, -1), tiles], dim=1)
        return self.pos_layer(self.layer1(tokens), side)
