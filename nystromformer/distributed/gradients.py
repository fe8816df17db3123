"""Gradients of parameters that every rank has a copy of."""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nystromformer.attention.checks import check_choice
from nystromformer.distributed.collectives import check_group, max_over_ranks, rank_and_size, sum_over_ranks

BUCKET = 2**23
"""Gradients go in pieces of about so many numbers: few messages, and little memory beside the gradients."""
REDUCTIONS = ("sum", "mean")


def reduce_gradients(module: nn.Module, group: ProcessGroup | None = None, reduction: str = "sum") -> None:
    """Add up the gradients of `module`'s parameters over the ranks, between `backward` and the optimizer's step.

    Each rank computes the gradient of the sum of all ranks' losses through its own tokens; the whole gradient is the
    sum over ranks. "sum" is right where each rank has the loss of its own tokens, divided by the count on *all* ranks.
    "mean" is right where every rank computes the same loss, as from the pooled output, which would else count once for
    each rank. DistributedDataParallel over the same ranks does "mean".

    Parameters without gradient on any rank keep none.
    """
    check_group(group)
    check_choice("reduction", reduction, REDUCTIONS)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not parameters:
        return
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8, device=parameters[0].device)
    present = max_over_ranks(present, group, "gradients").tolist()
    ranks = rank_and_size(group)[1] if reduction == "mean" else 1
    for bucket in _buckets([p for p, anywhere in zip(parameters, present, strict=True) if anywhere]):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        total = sum_over_ranks(torch.cat([g.flatten() for g in gradients]), group, "gradients") / ranks
        for parameter, part in zip(bucket, total.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter).clone()


def _buckets(parameters: list[nn.Parameter]) -> list[list[Tensor]]:
    """Neighbours of one dtype and device, about `BUCKET` numbers together."""
    buckets: list[list[Tensor]] = []
    for parameter in parameters:
        last = buckets[-1] if buckets else []
        alike = last and (last[0].dtype, last[0].device) == (parameter.dtype, parameter.device)
        if alike and sum(p.numel() for p in last) + parameter.numel() <= BUCKET:
            last.append(parameter)
        else:
            buckets.append([parameter])
    return buckets
