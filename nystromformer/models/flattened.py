"""Flattened batches: sequences one after the other in one row, with no padding between them.

Transformers' `DataCollatorWithFlattening` makes such rows. Where sequences begin is told by `cu_seq_lens_q`, as its
`return_flash_attn_kwargs=True` gives it, or by `position_ids` that begin anew.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nystromformer.attention.shared.common import is_readable, shape_of
from nystromformer.attention.shared.varlen import Packing, packing


@dataclass(frozen=True)
class Borders:
    """Where the sequences of a flattened batch begin and end. It stands where a batch has its mask."""

    cu_seqlens: Tensor  # (b + 1,)
    max_seqlen: int | None = None  # the most tokens of a sequence, where it is known

    def packing(self, row: Tensor) -> Packing:
        """For `row` (tokens, ...)."""
        return packing("cu_seq_lens_q", self.cu_seqlens, row)

    def pool(self, hidden: Tensor, pooling: str) -> Tensor:
        """The first token ("cls") or the mean ("mean") of each sequence of `hidden` (1, tokens, d): (b, d).

        >>> hidden = torch.tensor([[[9.0], [1.0], [3.0]]])
        >>> Borders(torch.tensor([0, 1, 3])).pool(hidden, "mean")
        tensor([[9.],
                [2.]])
        """
        sequences = self.packing(hidden[0])
        if pooling == "cls":
            return hidden[0].index_select(0, sequences.offsets[:-1])
        total = hidden.new_zeros(sequences.number, hidden.shape[2]).index_add(0, sequences.owner, hidden[0])
        return total / sequences.counts[:, None]


def pool(hidden: Tensor, mask: Tensor | Borders | None, pooling: str) -> Tensor:
    """The first real token ("cls") or the mean of the real tokens ("mean") of `hidden` (b, n, d): (b, d).

    Of a flattened batch (1, n, d), those of each sequence within its borders.

    >>> hidden, mask = torch.tensor([[[9.0], [1.0], [3.0]]]), torch.tensor([[False, True, True]])
    >>> pool(hidden, mask, "cls"), pool(hidden, mask, "mean")
    (tensor([[1.]]), tensor([[2.]]))
    """
    if isinstance(mask, Borders):
        return mask.pool(hidden, pooling)
    if mask is None:
        return hidden[:, 0] if pooling == "cls" else hidden.mean(dim=1)
    if pooling == "cls":
        first = mask.long().argmax(dim=1)  # not simply 0: padding may stand on the left
        return hidden.gather(1, first[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
    total = torch.where(mask[..., None], hidden, torch.zeros((), dtype=hidden.dtype, device=hidden.device)).sum(dim=1)
    return total / mask.sum(dim=1, keepdim=True).clamp(min=1)


def flattened(
    tokens: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
) -> Borders | None:
    """The borders of `tokens` (1, n, …), from what came with them; None for a batch that is not flattened."""
    told = cu_seq_lens_k if cu_seq_lens_q is None else cu_seq_lens_q
    counted = None
    # On other devices than CPUs looking at positions waits: it is left out where the borders are given.
    if position_ids is not None and (is_readable(position_ids) if told is not None else _in_python()):
        counted = restarts(position_ids)
    if told is None:
        if counted is None:
            return None
        told = counted
    elif counted is not None and counted.tolist() != told.tolist():
        raise ValueError(
            f"position_ids begin anew at {counted[1:-1].tolist()} and cu_seq_lens_q at {told[1:-1].tolist()}: must be "
            f"the same; leave one of them out."
        )
    if attention_mask is not None:
        raise ValueError(
            "attention_mask was given with cu_seq_lens_q: a flattened batch has no padding; leave attention_mask out."
        )
    if tokens.shape[0] != 1:
        raise ValueError(
            f"a flattened batch has {tokens.shape[0]} rows: must be one, (1, tokens), with all sequences in it."
        )
    if cu_seq_lens_k is not None and cu_seq_lens_k is not told and cu_seq_lens_k.shape != told.shape:
        raise ValueError(
            f"cu_seq_lens_q has shape {shape_of(told)} and cu_seq_lens_k {shape_of(cu_seq_lens_k)}: must be equal in "
            f"self-attention."
        )
    longest = max_length_k if max_length_q is None else max_length_q
    return Borders(told, None if longest is None else int(longest))


def _in_python() -> bool:
    """Not in a graph, which can't have a number of sequences that depends on what positions hold."""
    return not torch.compiler.is_compiling()


def restarts(position_ids: Tensor) -> Tensor | None:
    """`cu_seqlens` of rows whose `position_ids` (b, n) begin anew; None where they do not, in a batch of whole rows.

    >>> restarts(torch.tensor([[0, 1, 2, 0, 0, 1]]))
    tensor([0, 3, 4, 6], dtype=torch.int32)
    >>> restarts(torch.tensor([[0, 1, 2, 3]]))
    """
    ids = position_ids if position_ids.dim() == 2 else position_ids[None]
    anew = ids.diff(dim=1) != 1  # (b n-1)
    if not bool(anew.any()) or bool((anew & (ids[:, 1:] != ids[:, :1])).any()):
        return None  # counted through, or not counted at all
    first = anew.any(0).nonzero()[:, 0] + 1
    ends = first.new_tensor([0]), first, first.new_tensor([ids.shape[1]])
    return torch.cat(ends).to(torch.int32)
