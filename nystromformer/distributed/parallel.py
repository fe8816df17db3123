"""`sequence_parallel`: layers and whole encoders that run on a shard of their sequence on each rank."""

import functools
import hashlib
import importlib.util

import torch
from torch import nn
from torch.distributed import ProcessGroup

from nystromformer.attention.nystrom import NystromSelfAttention
from nystromformer.attention.nystrom_layer import NystromAttention
from nystromformer.distributed.agreement import agree
from nystromformer.distributed.attention import sequence_parallel_nystrom_attention
from nystromformer.distributed.collectives import check_group, gather

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SequenceParallel:
    """What `sequence_parallel` made. `remove()`, or leaving its `with` block, gives the module its own ways back."""

    def __init__(self, module: nn.Module, group: ProcessGroup | None, check: bool) -> None:
        encoders = _encoders(module)
        inner = {id(part) for encoder in encoders for part in encoder.modules()}
        self.layers = [
            part
            for part in module.modules()
            if isinstance(part, (NystromAttention, NystromSelfAttention)) and id(part) not in inner
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

    def __exit__(self, *_: object) -> None:
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
    >>> layer = NystromAttention(dim=64, num_heads=4)
    >>> with sequence_parallel(layer):
    ...     layer(torch.randn(1, 300, 64)).shape
    torch.Size([1, 300, 64])
    >>> dist.destroy_process_group()
    """
    check_group(group)
    return SequenceParallel(module, group, check)


def _encoders(module: nn.Module) -> list[nn.Module]:
    if importlib.util.find_spec("transformers") is None:  # layers need torch alone
        return []
    from nystromformer.distributed.encoder import encoders_of

    return encoders_of(module)


def _sharded(encoder: nn.Module, group: ProcessGroup | None, check: bool) -> object:
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
