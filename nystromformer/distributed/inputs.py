"""What one rank was given for attention: checked, made ready, and compared with the other ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from nystromformer.attention.checks import check_mask, check_query_key_value
from nystromformer.attention.masks import zero_padding
from nystromformer.attention.nystrom_core import NystromOptions, checked_scale
from nystromformer.attention.skip_convolution import kernel_of
from nystromformer.distributed.layout import Layout, share_layouts


@dataclass(frozen=True)
class Inputs:
    """This rank's shard. An empty one has a masked row of zeros, so that it takes part in all collectives."""

    query: Tensor  # (b h n d), masked rows 0
    key: Tensor  # (b h s d)
    value: Tensor  # (b h s e)
    query_mask: Tensor | None
    key_mask: Tensor | None
    kernel: Tensor | None  # (h k)
    scale: float
    options: NystromOptions
    query_rows: int  # as given: 0 for an empty shard
    key_rows: int

    def layouts(self, group: ProcessGroup | None, check: bool) -> tuple[Layout, Layout]:
        """How queries and keys are laid out; with `check` only where all ranks were given what fits together."""
        shards = [(self.query_rows, self.query_mask), (self.key_rows, self.key_mask)]
        facts = self.facts() if check else None
        queries, keys = share_layouts(shards, len(self.query), facts, group, self.query.device)
        return queries, keys

    def facts(self) -> dict[str, object]:
        """What must be the same on all ranks: else collectives would not match, forward or backward."""
        tensors = {"query": self.query, "key": self.key, "value": self.value, "conv_weight": self.kernel}
        return {
            "batch": self.query.shape[0],
            "heads": self.query.shape[1],
            "head size": self.query.shape[3],
            "value's head size": self.value.shape[3],
            "dtype": str(self.query.dtype),
            "device": self.query.device.type,
            "scale": self.scale,
            "kernel size": None if self.kernel is None else self.kernel.shape[1],
            "gradients": torch.is_grad_enabled(),
            "with gradient": [name for name, x in tensors.items() if x is not None and x.requires_grad],
            **vars(self.options),
        }


def checked_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    conv_weight: Tensor | None,
    scale: float | None,
    options: NystromOptions,
) -> Inputs:
    """Raise `TypeError` or `ValueError` unless all that this rank was given is in order."""
    query, query_mask, query_rows = _with_a_row(query, query_mask)
    key, key_mask, key_rows = _with_a_row(key, key_mask)
    value, _, _ = _with_a_row(value, None)
    check_query_key_value(query, key, value)
    check_mask("query_mask", query_mask, query)
    check_mask("key_mask", key_mask, key)
    if options.landmarks != "segment_means":
        raise ValueError(
            f"landmarks={options.landmarks!r}: must be 'segment_means' where a sequence is split over ranks; k-means "
            f"would exchange all its centres at every step."
        )
    if conv_weight is not None and query_rows != key_rows:
        raise ValueError(
            f"conv_weight was given with {query_rows} queries and {key_rows} keys on one rank: the skip convolution "
            f"needs as many; leave conv_weight out for cross-attention."
        )
    return Inputs(
        query=zero_padding(query, query_mask),
        key=zero_padding(key, key_mask),
        value=zero_padding(value, key_mask),
        query_mask=query_mask,
        key_mask=key_mask,
        kernel=None if conv_weight is None else kernel_of(conv_weight, value.shape[1], value.dtype),
        scale=checked_scale(scale, query),
        options=options,
        query_rows=query_rows,
        key_rows=key_rows,
    )


def _with_a_row(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, int]:
    """`x`, its mask and the number of its rows. What is no (b, h, n, d) is left for the checks to refuse."""
    if not isinstance(x, Tensor) or x.dim() != 4:
        return x, mask, 0
    if x.shape[2] > 0:
        return x, mask, x.shape[2]
    return functional.pad(x, (0, 0, 0, 1)), torch.zeros(len(x), 1, dtype=torch.bool, device=x.device), 0
