"""TransMIL: slides classified from bags of tens of thousands of tiles, and the map of which tiles decided.

TransMIL (Shao et al., 2021) has a class token, two Nyström attention layers over all tiles, and between them
convolutions over the grid that the tiles were cut from. Here bags of any size share a step, packed one after the other
or by a mask, tiles go to their true places where coordinates are given, and the class token's row of attention weights
is made in O(n·m).
Parameters have the published names, so that weights go both ways; `TransMIL.from_published` predicts as they did.
"""

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from nystromformer.attention.nystrom.package import PackageAttention
from nystromformer.attention.shared.common import all_valid, check_floating, check_mask, shape_of
from nystromformer.attention.shared.varlen import lengths_to_offsets, packing
from nystromformer.checks import check_at_least
from nystromformer.models.mil_grid import GridConvolution, check_coordinates, checked_cells, square_cells


class TransMIL(nn.Module):
    """Logits (b, classes) of bags of tiles, given as features (b, n, features).

    Args:
        features: width of a tile's features.
        classes: number of logits.
        dim, heads, head_dim: width of the tokens, heads of an attention layer, and their width: dim / heads by default.
        num_landmarks: m; dim / 2 by default, as published.
        pinv_iterations: steps of the pseudoinverse.
        conv_kernel_size: of the attention's convolution along the sequence; None leaves it out, for a sharper map.
        dropout: on the output of attention.
        legacy: compute exactly what the published model computes from these weights: the first tiles are repeated
            until their number is a square, and attention pads as the `nystrom-attention` package does.

    >>> model = TransMIL(features=16, classes=2, dim=32, heads=4).eval()
    >>> bags = torch.randn(2, 300, 16)
    >>> mask = torch.arange(300) < torch.tensor([[300], [120]])
    >>> model(bags, mask).shape
    torch.Size([2, 2])
    >>> model.attention_map(bags, mask).shape
    torch.Size([2, 300])
    >>> model(torch.cat((bags[0], bags[1, :120])), cu_seqlens=torch.tensor([0, 300, 420])).shape
    torch.Size([2, 2])
    """

    def __init__(
        self,
        features: int = 1024,
        classes: int = 2,
        *,
        dim: int = 512,
        heads: int = 8,
        head_dim: int | None = None,
        num_landmarks: int | None = None,
        pinv_iterations: int = 6,
        conv_kernel_size: int | None = 33,
        dropout: float = 0.1,
        legacy: bool = False,
    ) -> None:
        super().__init__()
        check_at_least("features", features, 1)
        check_at_least("classes", classes, 1)
        check_at_least("dim", dim, 1)
        check_at_least("heads", heads, 1)
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim={dim} is not divisible by heads={heads}: change one, or give head_dim.")
            head_dim = dim // heads
        attention: dict[str, Any] = {
            "dim_head": head_dim,
            "heads": heads,
            "num_landmarks": max(dim // 2, 1) if num_landmarks is None else num_landmarks,
            "pinv_iterations": pinv_iterations,
            "residual": conv_kernel_size is not None,
            "dropout": dropout,
            "legacy": legacy,
        }
        if conv_kernel_size is not None:
            attention["residual_conv_kernel"] = conv_kernel_size
        self.features, self.classes, self.legacy = features, classes, legacy
        self._fc1 = nn.Sequential(nn.Linear(features, dim), nn.ReLU())
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.layer1 = AttentionLayer(dim, attention)
        self.pos_layer = GridConvolution(dim)
        self.layer2 = AttentionLayer(dim, attention)
        self.norm = nn.LayerNorm(dim)
        self._fc2 = nn.Linear(dim, classes)

    @classmethod
    def from_published(
        cls,
        state_dict: Mapping[str, Tensor],
        *,
        num_landmarks: int | None = None,
        pinv_iterations: int = 6,
        dropout: float = 0.1,
        legacy: bool = True,
    ) -> Self:
        """A model with published TransMIL weights. Sizes are read from them; landmarks can't be, dim / 2 is published.

        A prefix that all names have, such as Lightning's `model.`, is left out. With `legacy=False` the weights run
        under this model's own contract, with masks and coordinates; logits then differ from where they were trained.

        >>> published = TransMIL(features=16, classes=3, dim=32, heads=4).state_dict()
        >>> TransMIL.from_published({f"model.{name}": weight for name, weight in published.items()}).classes
        3
        """
        weights = _without_prefix(state_dict)
        dim, kernel = weights["cls_token"].shape[-1], weights.get("layer1.attn.res_conv.weight")
        if kernel is None:
            raise ValueError(
                "state_dict has no layer1.attn.res_conv.weight, which tells the heads: build TransMIL(..., "
                "conv_kernel_size=None, legacy=True) with the sizes it was trained with, and load_state_dict()."
            )
        heads = kernel.shape[0]
        model = cls(
            weights["_fc1.0.weight"].shape[1],
            weights["_fc2.weight"].shape[0],
            dim=dim,
            heads=heads,
            head_dim=weights["layer1.attn.to_qkv.weight"].shape[0] // (3 * heads),
            num_landmarks=num_landmarks,
            pinv_iterations=pinv_iterations,
            conv_kernel_size=kernel.shape[2],
            dropout=dropout,
            legacy=legacy,
        )
        model.to(weights["cls_token"].dtype).load_state_dict(weights)
        return model.eval()

    def forward(
        self, features: Tensor, mask: Tensor | None = None, coordinates: Tensor | None = None, *,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits (b, classes).

        Args:
            features: (b, n, features), of any n.
            mask: (b, n), True for real tiles. A bag gives the same alone as padded; what padding holds is ignored.
            coordinates: (b, n, 2), whole numbers: row and column of each tile in the grid, from any origin. Without
                them tiles fill a square row by row, as published.
            cu_seqlens: whole numbers (b + 1), from 0 to the number of tiles: where each bag begins and the last one
                ends. Then features are (tiles, features) of all bags, one after the other, and coordinates (tiles, 2);
                nothing is padded, and a bag gives what it gives alone.

        With `legacy` a mask or `cu_seqlens` make each bag run alone, as it did where the weights were trained.
        """
        return self._fc2(self.norm(self._attended(features, mask, coordinates, cu_seqlens)[0]))

    def attention_rows(
        self, features: Tensor, mask: Tensor | None = None, coordinates: Tensor | None = None, *,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """How much each head of the last layer takes from each tile for the class token: (b, heads, n), in O(n·m).

        With `cu_seqlens` it is (heads, tiles).

        These are the weights that the output was made with. With the class token's own they sum to about 1, and being
        approximated they can be slightly negative: rank them, rather than take their logarithm. Tiles that `legacy`
        repeats count with their repetition. 0 for padding.
        """
        rows = self._attended(features, mask, coordinates, cu_seqlens, rows=True)[1]
        assert rows is not None
        return rows

    def attention_map(
        self,
        features: Tensor,
        mask: Tensor | None = None,
        coordinates: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """The mean of `attention_rows` over heads, from 0 for the least to 1 for the most of each bag: (b, n).

        With `cu_seqlens` it is (tiles,).
        """
        rows = self.attention_rows(features, mask, coordinates, cu_seqlens=cu_seqlens)
        if cu_seqlens is None:
            return normalized_map(rows, mask)
        bags = rows.split(cu_seqlens.diff().tolist(), dim=1)
        return torch.cat([normalized_map(bag[None])[0] for bag in bags])

    def _attended(
        self,
        features: Tensor,
        mask: Tensor | None,
        coordinates: Tensor | None,
        cu_seqlens: Tensor | None = None,
        rows: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The class token (b, dim) after the last layer and, when asked for, its rows (b, heads, n)."""
        if cu_seqlens is not None:
            return self._attend_to_bags(features, mask, coordinates, cu_seqlens, rows)
        self._check_input(features, mask, coordinates)
        if not self.legacy:
            return self._attend_by_contract(features, mask, coordinates, rows)
        if mask is None:
            return self._attend_as_published(features, rows)
        tokens, maps = [], []
        for bag, real in zip(features, mask, strict=True):
            token, weights = self._attend_as_published(bag[real][None], rows)
            tokens.append(token)
            if weights is not None:
                at_their_places = weights.new_zeros(*weights.shape[:2], len(real))
                maps.append(at_their_places.masked_scatter(real, weights))
        return torch.cat(tokens), torch.cat(maps) if rows else None

    def _attend_to_bags(
        self, features: Tensor, mask: Tensor | None, coordinates: Tensor | None, cu_seqlens: Tensor, rows: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`_attended` of packed bags; rows are (heads, tiles)."""
        if mask is not None:
            raise ValueError("mask was given with cu_seqlens: packed bags have no padding; leave mask out.")
        check_floating("features", features)
        if features.dim() != 2:
            raise ValueError(
                f"features have shape {shape_of(features)}: with cu_seqlens they must be (tiles, {self.features})."
            )
        self._check_input(features[None], None, coordinates)
        sizes = packing("cu_seqlens", cu_seqlens, features).read_lengths()
        if self.legacy:
            each = [self._attend_as_published(bag[None], rows) for bag in features.split(sizes)]
        else:
            each = self._attend_to_packed(features, coordinates, sizes, rows)
        tokens, maps = zip(*each, strict=True)
        return torch.cat(tokens), torch.cat(maps, dim=2)[0] if rows else None

    def _attend_to_packed(
        self, features: Tensor, coordinates: Tensor | None, sizes: list[int], rows: bool
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The class token (1, dim) of each bag after the last layer and, when asked for, its rows (1, heads, n)."""
        if coordinates is not None:
            check_coordinates(coordinates, (len(features), 2))
        with_token = torch.tensor(sizes, device=features.device) + 1
        borders, token = lengths_to_offsets(with_token), self.cls_token[0]
        tiles = self._fc1(features).split(sizes)
        tokens = self.layer1.attend_packed(torch.cat([x for bag in tiles for x in (token, bag)]), borders)
        placed = [None] * len(sizes) if coordinates is None else coordinates.split(sizes)
        bags = []
        for bag, places in zip(tokens.split([size + 1 for size in sizes]), placed, strict=True):
            real = all_valid(bag[None, 1:])
            cells = square_cells(real) if places is None else checked_cells(places[None], real)
            bags.append(torch.cat((bag[:1], self.pos_layer(bag[None, 1:], cells, real)[0])))
        if rows:
            return [self._last_layer(bag[None], None, rows) for bag in bags]
        last = self.layer2.attend_packed(torch.cat(bags), borders)
        return [(each, None) for each in last.index_select(0, borders[:-1]).split(1)]

    def _attend_by_contract(
        self, features: Tensor, mask: Tensor | None, coordinates: Tensor | None, rows: bool
    ) -> tuple[Tensor, Tensor | None]:
        real = all_valid(features) if mask is None else mask
        features = features.masked_fill(~real[..., None], 0)
        cells = square_cells(real) if coordinates is None else checked_cells(coordinates, real)
        tokens = torch.cat([self.cls_token.expand(len(features), -1, -1), self._fc1(features)], dim=1)
        token_mask = None if mask is None else functional.pad(mask, (1, 0), value=True)
        tokens = self.layer1(tokens, token_mask)
        tiles = self.pos_layer(tokens[:, 1:], cells, real)
        return self._last_layer(torch.cat([tokens[:, :1], tiles], dim=1), token_mask, rows)

    def _attend_as_published(self, features: Tensor, rows: bool) -> tuple[Tensor, Tensor | None]:
        tiles, count = self._fc1(features), features.shape[1]
        side = math.ceil(math.sqrt(count))
        tiles = torch.cat([tiles, tiles[:, : side**2 - count]], dim=1)
        real = all_valid(tiles)
        tokens = self.layer1(torch.cat([self.cls_token.expand(len(tiles), -1, -1), tiles], dim=1), None)
        tiles = self.pos_layer(tokens[:, 1:], square_cells(real), real)
        token, weights = self._last_layer(torch.cat([tokens[:, :1], tiles], dim=1), None, rows)
        if weights is not None:
            repeated = functional.pad(weights[..., count:], (0, 2 * count - side**2))
            weights = weights[..., :count] + repeated
        return token, weights

    def _last_layer(self, tokens: Tensor, mask: Tensor | None, rows: bool) -> tuple[Tensor, Tensor | None]:
        if not rows:
            return self.layer2(tokens, mask)[:, 0], None
        out, weights = self.layer2.attn(self.layer2.norm(tokens), mask, return_attn=[0])
        return tokens[:, 0] + out[:, 0], weights[:, :, 0, 1:]

    def _check_input(self, features: Tensor, mask: Tensor | None, coordinates: Tensor | None) -> None:
        check_floating("features", features)
        if features.dim() != 3 or features.shape[1] < 1 or features.shape[2] != self.features:
            raise ValueError(
                f"features have shape {shape_of(features)}: must be (bags, tiles, {self.features}) with at least one "
                f"tile; add a dimension to a single bag with bag[None]."
            )
        check_mask("mask", mask, features)
        if mask is not None and not bool(mask.any(dim=1).all()):
            bag = int(mask.any(dim=1).logical_not().nonzero()[0])
            raise ValueError(f"mask leaves bag {bag} without a tile: every bag must have one; leave it out.")
        if coordinates is not None and self.legacy:
            raise ValueError(
                "coordinates were given with legacy=True: the published model folds the sequence into a square; leave "
                "them out, or use legacy=False."
            )


class AttentionLayer(nn.Module):
    """Pre-norm attention with its residual connection."""

    def __init__(self, dim: int, attention: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(dim), PackageAttention(dim, **attention)

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return tokens + self.attn(self.norm(tokens), mask)

    def attend_packed(self, tokens: Tensor, cu_seqlens: Tensor) -> Tensor:
        """The same for packed bags (tokens, dim)."""
        return tokens + self.attn.attend_packed(self.norm(tokens), cu_seqlens)


def normalized_map(rows: Tensor, mask: Tensor | None = None) -> Tensor:
    """`rows` (b, heads, n) as one map for the eye: the mean over heads, from 0 to 1 within each bag; (b, n).

    The order of tiles stays. Where all tiles weigh the same, all are 0, and so is padding.

    >>> normalized_map(torch.tensor([[[0.1, 0.3, 0.2], [0.3, 0.3, 0.3]]]))
    tensor([[0.0000, 1.0000, 0.5000]])
    """
    weights = rows.mean(dim=1)
    real = torch.ones_like(weights, dtype=torch.bool) if mask is None else mask
    least = weights.masked_fill(~real, torch.inf).amin(dim=1, keepdim=True)
    most = weights.masked_fill(~real, -torch.inf).amax(dim=1, keepdim=True)
    spread = (most - least).clamp(min=torch.finfo(weights.dtype).tiny)
    return ((weights - least) / spread).masked_fill(~real, 0)


def _without_prefix(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights by their published names."""
    tokens = [name for name in state_dict if name.endswith("cls_token")]
    if len(tokens) != 1:
        found = ", ".join(list(state_dict)[:5]) or "nothing"
        raise ValueError(
            f"state_dict has {len(tokens)} names that end in cls_token: must have one, beside _fc1, layer1, pos_layer, "
            f"layer2, norm and _fc2; it has {found} …; give the state_dict of a whole checkpoint."
        )
    prefix = tokens[0].removesuffix("cls_token")
    weights = {name.removeprefix(prefix): each for name, each in state_dict.items() if name.startswith(prefix)}
    missing = {"_fc1.0.weight", "_fc2.weight", "layer1.attn.to_qkv.weight"} - weights.keys()
    if missing:
        raise ValueError(f"state_dict has no {', '.join(sorted(missing))}: must be a whole TransMIL.")
    return weights
