"""The skip connection of the paper: a depthwise convolution of V over the sequence, one kernel for each head."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from nystromformer.attention.common import check_floating, check_tokens, shape_of
from nystromformer.checks import check_at_least, check_odd

BLOCK = 64
BLOCKS_AT_ONCE = 64


def skip_convolution(value: Tensor, weight: Tensor) -> Tensor:
    """Convolve `value` (b, h, n, e) over n with `weight` (h, k) or (h, 1, k, 1), k odd, zeros beyond the ends.

    out[b, h, i] = Σⱼ weight[h, j] · value[b, h, i + j − k//2]. The result has the memory layout (b, n, h, e).

    >>> value = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    >>> skip_convolution(value, torch.tensor([[0.0, 0.0, 1.0]])).flatten()
    tensor([2., 3., 0.])
    """
    check_tokens("value", value)
    return _SkipConvolution.apply(value, kernel_of(weight, value.shape[1], value.dtype))


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
    an order of magnitude slower on CPUs than the two products here. Both gradients are differentiable again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, kernel: Tensor) -> Tensor:
        return _depthwise(value, kernel)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        value, kernel = ctx.saved_tensors
        grad_value = _SkipConvolution.apply(grad, kernel.flip(1)) if ctx.needs_input_grad[0] else None
        grad_kernel = _kernel_gradient(grad, value, kernel.shape[1]) if ctx.needs_input_grad[1] else None
        return grad_value, grad_kernel


def _depthwise(value: Tensor, kernel: Tensor) -> Tensor:
    batch, heads, length, width = value.shape
    channels = value.transpose(1, 2).reshape(batch, length, heads * width).transpose(1, 2)[:, :, None]  # (b h·e 1 n)
    kernels = kernel.repeat_interleave(width, dim=0)[:, None, None, :]  # (h·e 1 1 k)
    out = functional.conv2d(channels, kernels, padding=(0, kernel.shape[1] // 2), groups=heads * width)
    return out[:, :, 0].transpose(1, 2).unflatten(2, (heads, width)).transpose(1, 2)


def _kernel_gradient(grad: Tensor, value: Tensor, kernel_size: int) -> Tensor:
    """grad_kernel[h, j] = Σ grad[b, h, i] · value[b, h, i + j − k//2] over b, i and the head's width.

    Rows whose whole window lies inside the sequence are taken in blocks from where they are; the few others, at both
    ends, are copied with the zeros that their windows reach into.
    """
    length, half = value.shape[2], kernel_size // 2
    inner = max(length - 2 * half, 0) // BLOCK * BLOCK
    if inner == 0:
        return _padded_kernel_gradient(grad, functional.pad(value, (0, 0, half, half)), kernel_size)
    first = functional.pad(value[:, :, : 2 * half], (0, 0, half, 0))
    last = functional.pad(value[:, :, inner:], (0, 0, 0, half))
    return (
        _padded_kernel_gradient(grad[:, :, :half], first, kernel_size)
        + _blocks_kernel_gradient(grad[:, :, half : half + inner], value[:, :, : inner + 2 * half], kernel_size)
        + _padded_kernel_gradient(grad[:, :, half + inner :], last, kernel_size)
    )


def _padded_kernel_gradient(rows: Tensor, windows: Tensor, kernel_size: int) -> Tensor:
    """As `_blocks_kernel_gradient` for any number of rows: zeros complete the last block."""
    if rows.shape[2] == 0:  # a kernel of one tap has no rows whose window leaves the sequence
        return rows.new_zeros(rows.shape[1], kernel_size)
    missing = -rows.shape[2] % BLOCK
    return _blocks_kernel_gradient(
        functional.pad(rows, (0, 0, 0, missing)), functional.pad(windows, (0, 0, 0, missing)), kernel_size
    )


def _blocks_kernel_gradient(rows: Tensor, windows: Tensor, kernel_size: int) -> Tensor:
    """Σ rows[b, h, i] · windows[b, h, i + j] for (b, h, B·L, e) and (b, h, B·L + k − 1, e): (h, k).

    A product (L × e) · (e × L + k − 1) for each block holds all pairs of a row and a row of its window; pairs with
    one distance j lie on one diagonal. Some blocks of one head at a time, so that these products stay in the cache.
    """
    batch, heads, length, _ = rows.shape
    rows = rows.unflatten(2, (length // BLOCK, BLOCK))  # (b h B L e)
    windows = windows.unfold(2, BLOCK + kernel_size - 1, BLOCK)  # (b h B e L+k-1)
    at_once = length // BLOCK if torch.compiler.is_compiling() else max(BLOCKS_AT_ONCE // batch, 1)
    pairs = []
    for head in range(heads):
        sums = [
            (some_rows @ some_windows).sum(dim=(0, 1))
            for some_rows, some_windows in zip(
                rows[:, head].split(at_once, dim=1), windows[:, head].split(at_once, dim=1), strict=True
            )
        ]
        pairs.append(sum(sums))
    # Distance j of row i stands in column i + j. Rows that are one longer in the same flat memory move it to column j.
    flat = functional.pad(torch.stack(pairs).flatten(1), (0, BLOCK))
    return flat.unflatten(1, (BLOCK, BLOCK + kernel_size))[:, :, :kernel_size].sum(dim=1)
