"""A whole model on a sequence that is split over processes: checked input, same weights, summed gradients."""

import functools
import hashlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nystromformer.checks import check_choice
from nystromformer.distributed.attention import sequence_parallel_nystrom_attention
from nystromformer.distributed.collectives import (
    agree,
    check_group,
    gather,
    max_over_ranks,
    rank_and_size,
    sum_over_ranks,
)

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
    anywhere = max_over_ranks(present, group, "gradients").tolist()
    ranks = rank_and_size(group)[1] if reduction == "mean" else 1
    for bucket in _buckets([p for p, has_one in zip(parameters, anywhere, strict=True) if has_one]):
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        total = sum_over_ranks(torch.cat([g.flatten() for g in gradients]), group, "gradients") / ranks
        for parameter, part in zip(bucket, total.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter).clone()


def _buckets(parameters: list[nn.Parameter]) -> list[list[Tensor]]:
    """Neighbors of one dtype and device, about `BUCKET` numbers together."""
    buckets: list[list[Tensor]] = []
    for parameter in parameters:
        last = buckets[-1] if buckets else []
        alike = last and (last[0].dtype, last[0].device) == (parameter.dtype, parameter.device)
        if alike and sum(p.numel() for p in last) + parameter.numel() <= BUCKET:
            last.append(parameter)
        else:
            buckets.append([parameter])
    return buckets


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SequenceParallel:
    """What `sequence_parallel` made. `remove()`, or leaving its `with` block, gives the module its own ways back."""

    def __init__(self, module: nn.Module, group: ProcessGroup | None, check: bool) -> None:
        encoders = _encoders(module)
        inner = {id(part) for encoder in encoders for part in encoder.modules()}
        self.layers: list[Any] = [
            part for part in module.modules() if getattr(part, "splits_over_ranks", False) and id(part) not in inner
        ]
        if not encoders and not self.layers:
            raise ValueError(
                f"{type(module).__name__} has no Nyström attention: give a NystromAttention layer, a "
                f"NystromformerModel or a module that holds some."
            )
        if any("operation" in vars(part) for part in module.modules()):
            raise ValueError(
                f"{type(module).__name__} runs on shards already: leave the with block of the first sequence_parallel, "
                f"or call its remove(), before the next."
            )
        if check:
            _check_same_weights(module, group)
        operation = functools.partial(sequence_parallel_nystrom_attention, group=group, check=check)
        for layer in self.layers:
            layer.operation = operation
        self.encoders = [_sharded(encoder, group, check) for encoder in encoders]

    def remove(self) -> None:
        for layer in self.layers:
            del layer.operation  # the class's own is there again
        for encoder in self.encoders:
            encoder.remove()
        self.layers, self.encoders = [], []

    def __enter__(self) -> "SequenceParallel":
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


def sequence_parallel(module: nn.Module, group: ProcessGroup | None = None, *, check: bool = True) -> SequenceParallel:
    """From now on every rank of `group` calls `module` with its own shard of the sequence (`split_sequence`).

    `module` is a `NystromAttention` layer, a `NystromformerModel`, a model with a head, or anything that holds some of
    these. All ranks have the same weights. Outputs for tokens are those of the rank's own tokens; positions are those
    in the whole sequence; an encoder's `pooler_output` (of "cls" or "mean") is that of the whole sequence on every
    rank. Losses and gradients: see `reduce_gradients`. With gradient checkpointing, call `backward` before the next
    forward pass and before this is undone: layers are then computed again.

    `check`: compare weights now, and in each forward pass what the ranks were given.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: "gloo" alone
    >>> from nystromformer import NystromAttention
    >>> layer = NystromAttention(dim=64, num_heads=4)
    >>> with sequence_parallel(layer):
    ...     layer(torch.randn(1, 300, 64)).shape
    torch.Size([1, 300, 64])
    >>> dist.destroy_process_group()
    """
    check_group(group)
    return SequenceParallel(module, group, check)


def _encoders(module: nn.Module) -> list[Any]:
    if importlib.util.find_spec("transformers") is None:  # layers need torch alone
        return []
    from nystromformer.distributed.encoder import encoders_of

    return encoders_of(module)


def _sharded(encoder: Any, group: ProcessGroup | None, check: bool) -> Any:
    from nystromformer.distributed.encoder import ShardedEncoder

    return ShardedEncoder(encoder, group, check)


def _check_same_weights(module: nn.Module, group: ProcessGroup | None) -> None:
    """Compare a number for each parameter, the sum of its bits as whole numbers, which tells other weights apart."""
    parameters = dict(module.named_parameters())
    device = next((x.device for x in parameters.values()), "cpu")
    shapes = " ".join(f"{name}{tuple(x.shape)}{x.dtype}" for name, x in parameters.items())
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:8]
    agree({"parameters": len(parameters), "digest of their names and shapes": digest}, (), group, device)
    sums = [x.detach().contiguous().view(BITS[x.element_size()]).sum(dtype=torch.int64) for x in parameters.values()]
    if not sums:
        return
    rows = gather(torch.stack(sums), group, "agreement")  # (ranks parameters)
    unlike = (rows != rows[0]).any(dim=0).tolist()
    if any(unlike):
        raise ValueError(
            f"{sum(unlike)} of {len(unlike)} parameters, the first of them {list(parameters)[unlike.index(True)]}, are "
            f"not the same on all ranks: load the same weights on all of them, or seed them alike with "
            f"torch.manual_seed before the model is made."
        )
