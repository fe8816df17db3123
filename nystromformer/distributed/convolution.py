"""The skip convolution over a sequence that is split over ranks."""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from nystromformer.attention.skip_convolution import skip_convolution
from nystromformer.distributed.collectives import neighbouring_rows
from nystromformer.distributed.layout import Layout


def add_sharded_convolution(
    out: Tensor, value: Tensor, kernel: Tensor, layout: Layout, group: ProcessGroup | None
) -> Tensor:
    """`out` + `skip_convolution` of the whole sequence with `kernel` (h, k), at this rank's rows (b, h, n, e).

    The convolution is linear: the shard's own rows are convolved where they are, and what neighbouring rows add to the
    first and last k//2 outputs is computed apart. So there is no copy of the shard together with its surroundings.
    """
    skip = skip_convolution(value, kernel)
    # Attention needs its own output for backward; without backward the sum needs no memory of its own.
    total = out + skip if out.requires_grad else out.add_(skip)
    half = kernel.shape[1] // 2
    if half == 0 or layout.length == 0:  # a rank without rows takes no part: it needs none, and nobody needs any of it
        return total
    before, after = neighbouring_rows(value, half, layout.lengths, group, "halo")
    rows = min(half, layout.length)
    own = value.new_zeros(*value.shape[:2], rows, value.shape[3])
    first = skip_convolution(torch.cat((before, own), dim=2), kernel)[:, :, half:]
    last = skip_convolution(torch.cat((own, after), dim=2), kernel)[:, :, :rows]
    return _AddAtEnds.apply(total, first, last)


class _AddAtEnds(Function):
    """In place; the built-in backward of such a sum would copy the whole gradient for each end."""

    @staticmethod
    def forward(total: Tensor, first: Tensor, last: Tensor) -> Tensor:
        total[:, :, : first.shape[2]] += first
        total[:, :, total.shape[2] - last.shape[2] :] += last
        return total

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.rows = inputs[1].shape[2]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad, grad[:, :, : ctx.rows], grad[:, :, grad.shape[2] - ctx.rows :]
