"""The skip connection of the paper: a depthwise convolution of V over the sequence, one kernel for each head."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from nystromformer.attention import native
from nystromformer.attention.shared.common import (
    at_least_float32,
    check_floating,
    check_tokens,
    refuse_forward_mode,
    shape_of,
)
from nystromformer.checks import check_at_least, check_odd

BLOCK = 32
"""Rows whose products with the rows of their windows are taken together for a kernel's gradient. More waste more pairs
of rows that are too far apart, fewer make products too small to be fast."""


def skip_convolution(value: Tensor, weight: Tensor) -> Tensor:
    """Convolve `value` (b, h, n, e) over n with `weight` (h, k) or (h, 1, k, 1), k odd, zeros beyond the ends.

    out[b, h, i] = Σⱼ weight[h, j] · value[b, h, i + j − k//2]. The result has the memory layout (b, n, h, e).

    >>> value = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    >>> skip_convolution(value, torch.tensor([[0.0, 0.0, 1.0]])).flatten()
    tensor([2., 3., 0.])
    """
    check_tokens("value", value)
    kernel = kernel_of(weight, value.shape[1], value.dtype)
    refuse_forward_mode(value, kernel)
    return _SkipConvolution.apply(value, kernel)


def kernel_of(weight: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """`weight` as (h, k) in `dtype`, checked."""
    check_floating("conv_weight", weight)
    fits = weight.dim() == 2 or (weight.dim() == 4 and weight.shape[1] == weight.shape[3] == 1)
    if not fits or weight.shape[0] != heads:
        raise ValueError(
            f"conv_weight has shape {shape_of(weight)}: must be ({heads}, k) or ({heads}, 1, k, 1), one kernel a head."
        )
    kernel = weight if weight.dim() == 2 else weight[:, 0, :, 0]
    check_odd("conv_weight's kernel size", kernel.shape[1])
    return kernel.to(dtype)


class SkipConvolution(nn.Module):
    """`skip_convolution` with a trainable `weight` (h, 1, k, 1), the shape of published checkpoints.

    >>> SkipConvolution(num_heads=4, kernel_size=33)(torch.randn(2, 4, 100, 8)).shape
    torch.Size([2, 4, 100, 8])
    """

    keeps_own_start = True
    """A model that initializes its weights leaves this one to `reset_parameters`."""

    def __init__(self, num_heads: int, kernel_size: int) -> None:
        super().__init__()
        check_at_least("num_heads", num_heads, 1)
        check_odd("kernel_size", kernel_size)
        self.weight = nn.Parameter(torch.empty(num_heads, 1, kernel_size, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # what a convolution of this shape starts from

    def forward(self, value: Tensor) -> Tensor:
        return skip_convolution(value, self.weight)

    def extra_repr(self) -> str:
        return f"num_heads={self.weight.shape[0]}, kernel_size={self.weight.shape[2]}"


class _SkipConvolution(torch.autograd.Function):
    """Forward in the channels-last layout that projections produce; the built-in backward of such a convolution is
    an order of magnitude slower on CPUs than the two here. Both gradients are differentiable again."""

    @staticmethod
    def forward(value: Tensor, kernel: Tensor) -> Tensor:
        if value.device.type == "cpu":
            # In half precision, too: PyTorch's bfloat16 convolution of such kernels never returns on some processors
            # with instructions for bfloat16 (oneDNN's, torch 2.13).
            wide = at_least_float32(value.dtype)
            return _convolve(value.to(wide), kernel.to(wide)).to(value.dtype)
        return _convolve(value, kernel)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        value, kernel = ctx.saved_tensors
        grad_value = _SkipConvolution.apply(grad, kernel.flip(1)) if ctx.needs_input_grad[0] else None
        grad_kernel = _kernel_gradient(grad, value, kernel.shape[1]) if ctx.needs_input_grad[1] else None
        return grad_value, grad_kernel

    @staticmethod
    def vmap(info, in_dims: tuple, value: Tensor, kernel: Tensor) -> tuple[Tensor, int]:
        """Each head has a kernel of its own, so what is mapped over is more heads."""
        value, kernel = (
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip((value, kernel), in_dims, strict=True)
        )
        out = _SkipConvolution.apply(value.transpose(0, 1).flatten(1, 2), kernel.flatten(0, 1))
        return out.unflatten(1, kernel.shape[:2]), 1


def _convolve(value: Tensor, kernel: Tensor) -> Tensor:
    return (native.skip if native.runs_native(value, kernel) else _depthwise)(value, kernel)


def _depthwise(value: Tensor, kernel: Tensor) -> Tensor:
    batch, heads, length, width = value.shape
    channels = value.transpose(1, 2).reshape(batch, length, heads * width).transpose(1, 2)[:, :, None]  # (b h·e 1 n)
    kernels = kernel.repeat_interleave(width, dim=0)[:, None, None, :]  # (h·e 1 1 k)
    out = functional.conv2d(channels, kernels, padding=(0, kernel.shape[1] // 2), groups=heads * width)
    return out[:, :, 0].transpose(1, 2).unflatten(2, (heads, width)).transpose(1, 2)


def _kernel_gradient(grad: Tensor, value: Tensor, kernel_size: int) -> Tensor:
    """grad_kernel[h, j] = Σ grad[b, h, i] · value[b, h, i + j − k//2] over b, i and the head's width: (h, k).

    For a block of L rows, a product (L × e) · (e × L + k − 1) holds all pairs of a row and a row of its window, and
    pairs with one distance j lie on one diagonal. Products of all blocks are added up.
    """
    if not torch.is_grad_enabled() and native.runs_native(grad, value):
        return native.skip_kernel_gradient(grad, value, kernel_size)
    # One product after the other is fastest on a CPU without machine code of our own: nothing is copied, and the sum
    # stays in a cache. Elsewhere each would be a launch, and a compiled graph has no loop of a length like the input's.
    one_by_one = grad.device.type == "cpu" and not (torch.compiler.is_compiling() or torch.is_grad_enabled())
    pairs = (_pairs_one_by_one if one_by_one else _pairs_at_once)(grad, value, kernel_size)  # (h L L+k-1)
    # Distance j of row i stands in column i + j. Rows that are one longer in the same flat memory move it to column j.
    flat = functional.pad(pairs.flatten(1), (0, BLOCK))
    return flat.unflatten(1, (BLOCK, BLOCK + kernel_size))[:, :, :kernel_size].sum(dim=1).to(grad.dtype)


def _pairs_one_by_one(grad: Tensor, value: Tensor, kernel_size: int) -> Tensor:
    batch, heads, length, _ = grad.shape
    half, wide = kernel_size // 2, at_least_float32(grad.dtype)
    pairs = grad.new_zeros(batch * heads, BLOCK, BLOCK + kernel_size - 1, dtype=wide)
    for first in range(0, length, BLOCK):
        after = min(first + BLOCK, length)
        rows = slice(max(first - half, 0), min(after + half, length))  # of the window that are inside the sequence
        pairs[:, : after - first, rows.start - first + half : rows.stop - first + half].baddbmm_(
            grad[:, :, first:after].flatten(0, 1).to(wide), value[:, :, rows].flatten(0, 1).to(wide).mT
        )
    return pairs.unflatten(0, (batch, heads)).sum(0)


def _pairs_at_once(grad: Tensor, value: Tensor, kernel_size: int) -> Tensor:
    half, missing = kernel_size // 2, -grad.shape[2] % BLOCK
    rows = functional.pad(grad, (0, 0, 0, missing)).unflatten(2, (-1, BLOCK))  # (b h B L e)
    windows = functional.pad(value, (0, 0, half, half + missing)).unfold(2, BLOCK + kernel_size - 1, BLOCK)
    return torch.einsum("bhnie, bhnej -> hij", rows, windows)
