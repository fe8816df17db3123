"""`torchmil.nn.attention.NystromAttention`, name by name, and a way to put it into a model of torchmil that you have.

    from nystromformer.integrations.torchmil import adapt

    adapt(model)  # a torchmil model: its Nyström layers become these, with the same weights

torchmil's layer is that of the `nystrom-attention` package without its convolution: it pads in front, scales its
pseudoinverse by the whole batch and makes matrices of n×m, with `return_att` of n×n. Here examples of a batch don't
meet, lengths just work, and rows cost O(n·m); `legacy=True` computes what torchmil computes. torchmil is not needed.
"""

from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn

from nystromformer.attention.nystrom.core import NystromOptions
from nystromformer.attention.nystrom.package import PackageArithmetic, check_matrix_length
from nystromformer.attention.shared.common import check_mask, shape_of
from nystromformer.checks import check_at_least


class NystromAttention(PackageArithmetic):
    """Multi-head Nyström attention, (b, n, in_dim) to (b, n, out_dim), with torchmil's arguments and weights.

    Args:
        in_dim, out_dim, att_dim: of the input, the output (in_dim by default), and all heads together.
        n_heads: must divide att_dim, and without `learn_weights` in_dim.
        learn_weights: project queries, keys and values; otherwise all three are the input, and att_dim sets the
            scale of the logits alone, as in torchmil.
        n_landmarks: m; exact for examples with at most m valid tokens, unless `legacy`.
        pinv_iterations: steps of the pseudoinverse.
        legacy: compute exactly what torchmil computes, for weights that were trained with it.

    >>> import torch
    >>> attention = NystromAttention(in_dim=32, att_dim=64, n_heads=4, n_landmarks=16)
    >>> y, rows = attention(torch.randn(1, 3000, 32), return_att=[0])
    >>> y.shape, rows.shape
    (torch.Size([1, 3000, 32]), torch.Size([1, 4, 1, 3000]))
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int | None = None,
        att_dim: int = 512,
        n_heads: int = 4,
        learn_weights: bool = True,
        n_landmarks: int = 256,
        pinv_iterations: int = 6,
        *,
        legacy: bool = False,
    ) -> None:
        super().__init__()
        out_dim = in_dim if out_dim is None else out_dim
        for name, size in {"in_dim": in_dim, "out_dim": out_dim, "att_dim": att_dim, "n_heads": n_heads}.items():
            check_at_least(name, size, 1)
        NystromOptions(num_landmarks=n_landmarks, pinv_iterations=pinv_iterations)  # checks them
        width_name, width = ("att_dim", att_dim) if learn_weights else ("in_dim", in_dim)
        if width % n_heads:
            raise ValueError(f"{width_name}={width} is not divisible by n_heads={n_heads}: change one of them.")
        self.in_dim, self.n_heads, self.head_dim, self.learn_weights = in_dim, n_heads, width // n_heads, learn_weights
        self.num_landmarks, self.pinv_iterations, self.legacy = n_landmarks, pinv_iterations, legacy
        self.scale, self.eps = (att_dim // n_heads) ** -0.5, 1e-8
        self.qkv_nn = nn.Linear(in_dim, 3 * att_dim, bias=False) if learn_weights else None
        self.out_proj = nn.Identity() if out_dim == width else nn.Linear(width, out_dim)

    @classmethod
    def from_torchmil(cls, layer: Any, *, legacy: bool = False) -> Self:
        """torchmil's `layer` as one of these, which shares its weights."""
        projection, out = layer.qkv_nn, layer.out_proj
        in_dim = layer.head_dim * layer.n_heads if projection is None else projection.in_features
        ours = cls(
            in_dim,
            out.out_features if isinstance(out, nn.Linear) else layer.head_dim * layer.n_heads,
            round(layer.scale_factor**-2) * layer.n_heads,
            layer.n_heads,
            layer.learn_weights,
            layer.n_landmarks,
            layer.pinv_iterations,
            legacy=legacy,
        )
        ours.qkv_nn, ours.out_proj, ours.scale, ours.eps = projection, out, layer.scale_factor, layer.eps
        return ours.train(layer.training)

    @property
    def n_landmarks(self) -> int:
        return self.num_landmarks

    @property
    def scale_factor(self) -> float:
        return self.scale

    def forward(
        self, x: Tensor, mask: Tensor | None = None, return_att: bool | Sequence[int] | Tensor = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend within `x` (b, n, in_dim): (b, n, out_dim). `mask` (b, n) is True for real tokens.

        Args:
            return_att: rows such as [0] to also get them, (b, h, len(rows), n), in O(n·m); True for the whole matrix
                of short input, (b, h, n, n).
        """
        if x.dim() != 3 or x.shape[2] != self.in_dim:
            raise ValueError(f"x has shape {shape_of(x)}: must be (batch, length, {self.in_dim}).")
        mask = None if mask is None else mask.bool()  # torchmil's own collate function gives bytes
        check_mask("mask", mask, x)
        length = x.shape[1]
        if return_att is True:
            check_matrix_length("return_att", length + self.padding(length))
        projected = (x, x, x) if self.qkv_nn is None else self.qkv_nn(x).chunk(3, dim=2)
        query, key, value = (y.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for y in projected)
        out = self.attend(query, key, value, mask, None).transpose(1, 2).flatten(2)
        out = self.out_proj(out[:, -length:])
        if return_att is False:
            return out
        rows = self.rows(query, key, mask, None if isinstance(return_att, bool) else return_att)
        return out, rows[:, :, -length:, -length:] if return_att is True else rows


def adapt(model: nn.Module, *, legacy: bool = False) -> list[str]:
    """Put ours in the place of each Nyström layer of torchmil within `model`, with its weights: the names replaced.

    With `legacy=True` the model predicts as before, from less memory; without, examples of a batch and padding no
    longer change each other's results.
    """
    theirs = [name for name, layer in model.named_modules() if _is_torchmils(layer)]
    if not theirs or "" in theirs:
        raise ValueError(
            f"{type(model).__name__} has no layer of torchmil's NystromAttention inside: it must have one; for "
            f"such a layer itself use NystromAttention.from_torchmil(layer), for other models "
            f"nystromformer.replace_attention."
        )
    for name in theirs:
        model.set_submodule(name, NystromAttention.from_torchmil(model.get_submodule(name), legacy=legacy))
    return theirs


def _is_torchmils(layer: nn.Module) -> bool:
    return type(layer).__name__ == "NystromAttention" and type(layer).__module__.startswith("torchmil.")
