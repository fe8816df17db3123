"""One vector for a sequence that is split over ranks."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from nystromformer.attention.landmarks import at_least_float32
from nystromformer.distributed.collectives import sum_over_ranks
from nystromformer.distributed.layout import Layout


def pool_over_ranks(
    hidden: Tensor, mask: Tensor | None, layout: Layout, pooling: str, group: ProcessGroup | None
) -> Tensor:
    """The first real token ("cls") or the mean of the real tokens ("mean") of the whole sequence: (b, d) on every rank.

    `hidden` (b, n, d) is this rank's shard; an empty one comes as one masked row.
    """
    if pooling == "mean":
        present = hidden if mask is None else torch.where(mask[..., None], hidden, hidden.new_zeros(()))
        share = present.sum(dim=1, dtype=at_least_float32(hidden.dtype)) / layout.valid.clamp(min=1)[:, None]
        return sum_over_ranks(share, group, "pooling").to(hidden.dtype)
    if mask is None:
        first, here = torch.zeros_like(layout.valid), layout.before == 0
    else:
        first, here = mask.long().argmax(dim=1), (layout.before == 0) & mask.any(dim=1)
    if layout.start == 0 and layout.length > 0:
        here = here | (layout.valid == 0)  # of nothing but padding the very first token is taken, as in one process
    row = hidden.gather(1, first[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
    return sum_over_ranks(torch.where(here[:, None], row, hidden.new_zeros(())), group, "pooling")
