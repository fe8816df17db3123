"""The `nystrom-attention` package, name by name: change one import, or none, and keep trained weights.

    from nystromformer.integrations.nystrom_attention import NystromAttention, Nystromformer

Same arguments, attributes, calls and state-dict keys. An example's output depends neither on its batch nor on its
padding, any length works without tokens being added, and short input is exact. Weights that were trained with the
package predict as before with `legacy=True`, which computes what the package computes. `install()` gives these names
to other packages, which import `nystrom_attention`.
"""

import sys
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from nystromformer.attention.nystrom.package import PackageAttention
from nystromformer.attention.nystrom.pseudoinverse import iterative_pinv
from nystromformer.checks import check_at_least, check_fraction

PACKAGE = "nystrom_attention"
SUBMODULE = "nystrom_attention.nystrom_attention"
_INSTALLED = "__nystromformer__"
"""The attribute that tells our modules from the package's."""


class NystromAttention(PackageAttention):
    """`nystrom_attention.NystromAttention`, on (b, n, dim).

    >>> import torch
    >>> attention = NystromAttention(dim=64, dim_head=16, heads=4, num_landmarks=32)
    >>> x = torch.randn(1, 5000, 64)
    >>> out, rows = attention(x, return_attn=[0])  # how the first token looks at all others
    >>> out.shape, rows.shape
    (torch.Size([1, 5000, 64]), torch.Size([1, 4, 1, 5000]))
    """


class Nystromformer(nn.Module):
    """`nystrom_attention.Nystromformer`: pre-norm layers of attention and feed-forward on (b, n, dim).

    >>> import torch
    >>> model = Nystromformer(dim=32, depth=2, dim_head=8, heads=4, num_landmarks=16)
    >>> model(torch.randn(2, 100, 32), mask=torch.arange(100) < torch.tensor([[100], [70]])).shape
    torch.Size([2, 100, 32])
    """

    def __init__(
        self,
        *,
        dim: int,
        depth: int,
        dim_head: int = 64,
        heads: int = 8,
        num_landmarks: int = 256,
        pinv_iterations: int = 6,
        attn_values_residual: bool = True,
        attn_values_residual_conv_kernel: int = 33,
        attn_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        legacy: bool = False,
    ) -> None:
        super().__init__()
        check_at_least("depth", depth, 1)
        self.layers = nn.ModuleList()
        for _ in range(depth):
            attention = NystromAttention(
                dim,
                dim_head=dim_head,
                heads=heads,
                num_landmarks=num_landmarks,
                pinv_iterations=pinv_iterations,
                residual=attn_values_residual,
                residual_conv_kernel=attn_values_residual_conv_kernel,
                dropout=attn_dropout,
                legacy=legacy,
            )
            feed_forward = FeedForward(dim, dropout=ff_dropout)
            self.layers.append(nn.ModuleList([PreNorm(dim, attention), PreNorm(dim, feed_forward)]))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            attention, feed_forward = layer.children()
            x = x + attention(x, mask=mask)
            x = x + feed_forward(x)
        return x


Nystromer = Nystromformer


class PreNorm(nn.Module):
    """`fn` of the normalized input."""

    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x: Tensor, **options: Any) -> Any:
        return self.fn(self.norm(x), **options)


class FeedForward(nn.Module):
    """Two linear layers, `mult` times as wide between them."""

    def __init__(self, dim: int, mult: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        check_at_least("mult", mult, 1)
        check_fraction("dropout", dropout)
        self.net = nn.Sequential(nn.Linear(dim, mult * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(mult * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def moore_penrose_iter_pinv(x: Tensor, iters: int = 6) -> Tensor:
    """The package's pseudoinverse of each matrix of `x` (..., m, m), from norms over all of them.

    >>> import torch
    >>> moore_penrose_iter_pinv(torch.eye(2)[None] * 2, iters=8)
    tensor([[[0.5000, 0.0000],
             [0.0000, 0.5000]]])
    """
    return iterative_pinv(x, iters, "batch").to(x.dtype)


def exists(val: object) -> bool:
    return val is not None


def install(*, legacy: bool = False) -> ExitStack:
    """From now on `import nystrom_attention` gives these names, wherever it is written. The package need not exist.

    Args:
        legacy: classes that other packages build compute what the package computes; for trained weights.

    Returns:
        a context manager that uninstalls: `with install(legacy=True): …`. Ignore it to leave the names in place.

    Raises:
        RuntimeError: the package itself was imported before.
    """
    for name in (PACKAGE, SUBMODULE):
        if name in sys.modules and not hasattr(sys.modules[name], _INSTALLED):
            raise RuntimeError(
                f"{name} was imported before install(): what others took from it stays the package's; call install() "
                f"before the first import of it, or of what imports it."
            )
    names = {
        "NystromAttention": _LegacyAttention if legacy else NystromAttention,
        "Nystromformer": _LegacyNystromformer if legacy else Nystromformer,
    }
    submodule = _module(SUBMODULE, names | {"PreNorm": PreNorm, "FeedForward": FeedForward, "exists": exists})
    submodule.__dict__["moore_penrose_iter_pinv"] = moore_penrose_iter_pinv
    package = _module(PACKAGE, names | {"Nystromer": names["Nystromformer"], "nystrom_attention": submodule})
    sys.modules |= {PACKAGE: package, SUBMODULE: submodule}
    stack = ExitStack()
    stack.callback(uninstall)
    return stack


def uninstall() -> None:
    """Undo `install()`: later imports get the package again, where there is one. Safe to call again."""
    for name in (SUBMODULE, PACKAGE):
        if hasattr(sys.modules.get(name), _INSTALLED):
            del sys.modules[name]


def _module(name: str, contents: dict[str, Any]) -> ModuleType:
    module = module_from_spec(ModuleSpec(name, loader=None, is_package=name == PACKAGE))
    module.__doc__ = "The names of the nystrom-attention package, by nystromformer.integrations.nystrom_attention."
    module.__dict__.update(contents, **{_INSTALLED: True})
    return module


class _LegacyAttention(NystromAttention):
    """`NystromAttention` for packages that do not know the option."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"legacy": True} | options)


class _LegacyNystromformer(Nystromformer):
    def __init__(self, **options: Any) -> None:
        super().__init__(**{"legacy": True} | options)


_LegacyAttention.__name__ = _LegacyAttention.__qualname__ = "NystromAttention"
_LegacyNystromformer.__name__ = _LegacyNystromformer.__qualname__ = "Nystromformer"
