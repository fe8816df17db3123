"""How a sequence lies on the processes, and how it is split and gathered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nystromformer.attention.nystrom.landmarks import Segments, segments_of_ranks
from nystromformer.attention.shared.common import shape_of
from nystromformer.checks import check_at_least
from nystromformer.distributed.collectives import PURPOSE, agree, check_group, gather, gather_parts, rank_and_size


@dataclass(frozen=True)
class Layout:
    """One rank's view of a sequence split into contiguous shards, in the order of the ranks."""

    rank: int
    lengths: tuple[int, ...]  # tokens of each shard
    before: Tensor  # (b,): valid tokens of the shards before this one
    valid: Tensor  # (b,): valid tokens of all shards
    fewest: int  # the smallest of `valid`

    @property
    def length(self) -> int:
        """Tokens of this rank's shard."""
        return self.lengths[self.rank]

    @property
    def start(self) -> int:
        """The place of this shard's first token in the sequence."""
        return sum(self.lengths[: self.rank])

    @property
    def total(self) -> int:
        """Tokens of all shards."""
        return sum(self.lengths)

    def segments(self, mask: Tensor | None, rows: int, num_segments: int) -> Segments:
        """The segments of this shard's `rows`, counted over the valid tokens of the whole sequence."""
        if mask is None:
            order = torch.arange(rows, device=self.valid.device).expand(len(self.valid), rows)
        else:
            order = mask.long().cumsum(dim=1) - mask.long()
        return segments_of_ranks(self.before[:, None] + order, self.valid, num_segments)


def share_layouts(
    shards: Sequence[tuple[int, Tensor | None]],
    batch: int,
    facts: Mapping[str, Any] | Exception | None,
    group: ProcessGroup | None,
    device: torch.device | str,
) -> list[Layout]:
    """Tell all ranks the lengths and valid tokens of some `shards`, each (length, mask (b, length) or None).

    `facts` must be the same on all ranks (see `agree`); None leaves that unchecked.
    """
    lengths = [length for length, _ in shards]
    if facts is None:
        rows = gather(torch.tensor(lengths, device=device), group, PURPOSE).tolist()
    else:
        rows = agree(facts, lengths, group, device)
    own = [torch.full((batch,), n, device=device) if mask is None else mask.sum(dim=1) for n, mask in shards]
    counts = gather(torch.stack(own), group, "layout")  # (ranks shards b)
    rank, _ = rank_and_size(group)
    valid = counts.sum(dim=0)  # (shards b)
    fewest = valid.amin(dim=1).tolist()
    return [
        Layout(rank, tuple(row[i] for row in rows), counts[:rank, i].sum(dim=0), valid[i], fewest[i])
        for i in range(len(shards))
    ]


def shard_lengths(total: int, ranks: int) -> tuple[int, ...]:
    """Lengths of contiguous shards that differ by one token at most.

    >>> shard_lengths(10, 3)
    (4, 3, 3)
    """
    check_at_least("total", total, 0)
    check_at_least("ranks", ranks, 1)
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


INPUTS = ("input_ids", "inputs_embeds", "x")
"""The entries of a batch that tell how long its sequences are."""


def split_sequence(
    batch: Tensor | Mapping[str, Any],
    group: ProcessGroup | None = None,
    *,
    lengths: Sequence[int] | None = None,
    dim: int = 1,
) -> Tensor | dict[str, Any]:
    """This rank's contiguous shard of a tensor (b, n, ...), or of all tensors of that length in a batch.

    `lengths` are those of all ranks' shards; by default they differ by one token at most. In a batch as a tokenizer or
    a collator makes it, entries of another size along `dim` (labels of whole sequences) stay as they are. Nothing is
    sent: every rank has the whole batch, or loads its own shard in the first place.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> batch = split_sequence({"input_ids": torch.zeros(2, 50), "labels": torch.zeros(2)})
    >>> batch["input_ids"].shape, batch["labels"].shape
    (torch.Size([2, 50]), torch.Size([2]))
    >>> dist.destroy_process_group()
    """
    check_group(group)
    rank, ranks = rank_and_size(group)
    whole = batch if isinstance(batch, Tensor) else _input_of(batch)
    if whole.dim() <= dim:
        raise ValueError(f"a tensor of shape {shape_of(whole)} has no dimension {dim} to split: give (batch, length).")
    total = whole.shape[dim]
    lengths = shard_lengths(total, ranks) if lengths is None else tuple(lengths)
    if len(lengths) != ranks or sum(lengths) != total or min(lengths) < 0:
        raise ValueError(
            f"lengths={lengths}: must be {ranks} numbers, one for each rank, that add up to the {total} tokens; leave "
            f"them out for shards of about equal length."
        )

    def shard(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() <= dim or x.shape[dim] != total:
            return x
        return x.narrow(dim, sum(lengths[:rank]), lengths[rank]).clone()  # so that the whole need not stay in memory

    return shard(batch) if isinstance(batch, Tensor) else {name: shard(x) for name, x in batch.items()}


def gather_sequence(shard: Tensor, group: ProcessGroup | None = None, *, dim: int = 1) -> Tensor:
    """The whole (b, n, ...) from each rank's `shard` (b, its length, ...), on every rank. Has a gradient.

    For results at the end. It sends all tokens to all ranks: none of the attentions here needs it.
    """
    check_group(group)
    facts = {
        "shape": [size for axis, size in enumerate(shard.shape) if axis != dim],
        "dtype": str(shard.dtype),
        "with gradient": shard.requires_grad and torch.is_grad_enabled(),
    }
    lengths = [length for (length,) in agree(facts, [shard.shape[dim]], group, shard.device)]
    if shard.dtype == torch.bool:
        return gather_parts(shard.to(torch.uint8), lengths, dim, group, "gather").bool()
    return gather_parts(shard, lengths, dim, group, "gather")


def _input_of(batch: Mapping[str, Any]) -> Tensor:
    for name in INPUTS:
        if isinstance(batch.get(name), Tensor):
            return batch[name]
    raise ValueError(
        f"a batch with {', '.join(batch) or 'no entries'}: must have one of {', '.join(INPUTS)}, to tell how long its "
        f"sequences are; split other tensors one by one."
    )
