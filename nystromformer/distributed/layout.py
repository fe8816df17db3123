"""How a sequence is laid out over ranks: who has how many tokens, and how many of them are valid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nystromformer.attention.checks import check_at_least
from nystromformer.attention.landmarks import Segments, segments_of_ranks
from nystromformer.distributed.agreement import PURPOSE, agree
from nystromformer.distributed.collectives import gather, rank_and_size


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
    facts: Mapping[str, object] | Exception | None,
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
