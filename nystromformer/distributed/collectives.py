"""All that ranks send each other goes through this file: collectives with gradients, faults, and a count of bytes.

Gradients are those of the *sum of all ranks' losses*. So the backward of a sum over ranks is the sum over ranks of the
incoming gradients, and rows lent to a neighbor come back as gradients to be added. Every rank must therefore call
`backward`, and collectives then run in the reverse order of the forward pass on all of them.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


class CommunicationError(RuntimeError):
    """A rank has ended, or did not answer within the group's timeout."""


@dataclass
class Traffic:
    """What this rank sent, by purpose.

    `sent` counts the bytes that leave a rank with the ring algorithms of gloo and NCCL: 2 (r − 1) / r times the tensor
    for a reduction over r ranks, r − 1 times for a gathering, once for a message to a neighbor.
    """

    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Bytes sent, for all purposes."""
        return sum(self.sent.values())


_counting: list[Traffic] = []  # not one for each thread: the backward pass may run in another


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this rank sends inside.

    >>> with count_traffic() as traffic:
    ...     pass
    >>> traffic.total
    0
    """
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting[:] = [other for other in _counting if other is not traffic]


def check_group(group: ProcessGroup | None) -> None:
    """`group`, or the default group for None, must exist and hold this process."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            "torch.distributed has no process group here: start with torchrun and call "
            "torch.distributed.init_process_group('gloo'), or 'nccl' on GPUs, first."
        )
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"process {dist.get_rank()} is no member of the given group: only members of a group may split a "
            f"sequence over it; make one of those that take part with torch.distributed.new_group."
        )


def rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """This process's place in the group and the number of its ranks."""
    return dist.get_rank(group), dist.get_world_size(group)


def sum_over_ranks(x: Tensor, group: ProcessGroup | None, purpose: str) -> Tensor:
    """Σ x over the ranks, on every rank. Has a gradient."""
    return _SumOverRanks.apply(x, group, purpose)


def max_over_ranks(x: Tensor, group: ProcessGroup | None, purpose: str) -> Tensor:
    """The largest x of all ranks, element by element, on every rank. Without gradient."""
    return _reduced(x.detach(), dist.ReduceOp.MAX, group, purpose)


def gather(x: Tensor, group: ProcessGroup | None, purpose: str) -> Tensor:
    """The tensors of all ranks, of one shape, as (ranks, ...). Without gradient."""
    size = dist.get_world_size(group)
    x = x.detach().contiguous()
    rows = [torch.empty_like(x) for _ in range(size)]
    with _answered(purpose, group):
        dist.all_gather(rows, x, group=group)
    _count(purpose, (size - 1) * _bytes(x))
    return torch.stack(rows)


def gather_parts(x: Tensor, lengths: Sequence[int], dim: int, group: ProcessGroup | None, purpose: str) -> Tensor:
    """The parts of all ranks, `lengths` along `dim`, one after another. Has a gradient."""
    return _GatherParts.apply(x, tuple(lengths), dim, group, purpose)


def neighboring_rows(
    x: Tensor, width: int, lengths: Sequence[int], group: ProcessGroup | None, purpose: str
) -> tuple[Tensor, Tensor]:
    """The `width` rows before and after this rank's part of a sequence, (b, h, width, e) each. Has a gradient.

    `x` is (b, h, n, e) with `lengths` of all parts. Rows come from as many neighbors as it takes; beyond the ends of
    the sequence they are 0. An empty part lends nothing and gets nothing, and need not call this.
    """
    return _NeighboringRows.apply(x, width, tuple(lengths), group, purpose)


class _SumOverRanks(Function):
    @staticmethod
    def forward(x: Tensor, group: ProcessGroup | None, purpose: str) -> Tensor:
        return _reduced(x, dist.ReduceOp.SUM, group, purpose)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        _, ctx.group, ctx.purpose = inputs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduced(grad, dist.ReduceOp.SUM, ctx.group, ctx.purpose), None, None


class _GatherParts(Function):
    @staticmethod
    def forward(x: Tensor, lengths: tuple[int, ...], dim: int, group: ProcessGroup | None, purpose: str) -> Tensor:
        missing = max(lengths) - x.shape[dim]
        filler = x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])
        rows = gather(torch.cat((x, filler), dim), group, purpose)
        return torch.cat([row.narrow(dim, 0, length) for row, length in zip(rows, lengths, strict=True)], dim)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        _, ctx.lengths, ctx.dim, ctx.group, ctx.purpose = inputs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        total = _reduced(grad, dist.ReduceOp.SUM, ctx.group, ctx.purpose)
        rank = dist.get_rank(ctx.group)
        return total.narrow(ctx.dim, sum(ctx.lengths[:rank]), ctx.lengths[rank]), None, None, None, None


class _NeighboringRows(Function):
    @staticmethod
    def forward(
        x: Tensor, width: int, lengths: tuple[int, ...], group: ProcessGroup | None, purpose: str
    ) -> tuple[Tensor, Tensor]:
        halo = _Halo(width, lengths, dist.get_rank(group))
        before_and_after = x.new_zeros(*x.shape[:2], 2 * width, x.shape[3])
        lent = {peer: x[:, :, rows] for peer, rows in halo.lent.items()}
        for peer, rows in _exchanged(lent, before_and_after, halo.borrowed, group, purpose).items():
            before_and_after[:, :, halo.borrowed[peer]] = rows
        return before_and_after[:, :, :width].clone(), before_and_after[:, :, width:].clone()

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        x, ctx.width, ctx.lengths, ctx.group, ctx.purpose = inputs
        ctx.shape = x.shape

    @staticmethod
    @once_differentiable
    def backward(ctx, before: Tensor, after: Tensor) -> tuple[Tensor, None, None, None, None]:
        halo = _Halo(ctx.width, ctx.lengths, dist.get_rank(ctx.group))
        grad = before.new_zeros(ctx.shape)
        both = torch.cat((before, after), dim=2)
        borrowed = {peer: both[:, :, rows] for peer, rows in halo.borrowed.items()}
        for peer, rows in _exchanged(borrowed, grad, halo.lent, ctx.group, ctx.purpose).items():
            grad[:, :, halo.lent[peer]] += rows
        return grad, None, None, None, None


class _Halo:
    """Who lends which rows to whom. `lent` are rows of this rank's part, `borrowed` places among 2·width rows."""

    def __init__(self, width: int, lengths: tuple[int, ...], rank: int) -> None:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        parts = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        mine = parts[rank]
        self.lent: dict[int, slice] = {}
        self.borrowed: dict[int, slice] = {}
        for peer, theirs in enumerate(parts):
            if peer == rank or not theirs or not mine:
                continue
            if peer < rank:  # the end of their part is before mine, the start of mine is after theirs
                borrowed = range(max(theirs.start, mine.start - width), theirs.stop)
                lent = range(mine.start, min(mine.stop, theirs.stop + width))
                origin = mine.start - width
            else:
                borrowed = range(theirs.start, min(theirs.stop, mine.stop + width))
                lent = range(max(mine.start, theirs.start - width), mine.stop)
                origin = mine.stop - width
            if borrowed:
                self.borrowed[peer] = slice(borrowed.start - origin, borrowed.stop - origin)
            if lent:
                self.lent[peer] = slice(lent.start - mine.start, lent.stop - mine.start)


def _exchanged(
    sent: dict[int, Tensor], like: Tensor, received: dict[int, slice], group: ProcessGroup | None, purpose: str
) -> dict[int, Tensor]:
    """Send each peer its rows and receive those of the others; `received` tells how many."""
    sent = {peer: rows.contiguous() for peer, rows in sent.items()}
    arriving = {
        peer: like.new_empty(*like.shape[:2], rows.stop - rows.start, like.shape[3]) for peer, rows in received.items()
    }
    messages = [dist.P2POp(dist.isend, rows, group=group, group_peer=peer) for peer, rows in sent.items()]
    messages += [dist.P2POp(dist.irecv, rows, group=group, group_peer=peer) for peer, rows in arriving.items()]
    if not messages:
        return arriving
    with _answered(purpose, group):
        for message in dist.batch_isend_irecv(messages):
            message.wait()
    _count(purpose, sum(_bytes(rows) for rows in sent.values()))
    return arriving


def _reduced(x: Tensor, operation: Any, group: ProcessGroup | None, purpose: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    with _answered(purpose, group):
        dist.all_reduce(total, operation, group=group)
    size = dist.get_world_size(group)
    _count(purpose, 2 * (size - 1) * _bytes(total) // size)
    return total


@contextmanager
def _answered(purpose: str, group: ProcessGroup | None) -> Iterator[None]:
    """One clear line in place of a backend's own words."""
    try:
        yield
    except RuntimeError as error:
        rank, size = rank_and_size(group)
        reason = re.sub(r"^\[[^\]]*\] *", "", str(error).split("\n")[0]).split(". ")[0]  # not the place in its source
        raise CommunicationError(
            f"{purpose}: rank {rank} of {size} got no answer from the others ({reason}). A rank has ended or is slower "
            f"than the group's timeout: look for the first error in the output of all ranks; where one is only slow, "
            f"give init_process_group a longer timeout."
        ) from error


def _count(purpose: str, sent: int) -> None:
    for traffic in _counting:
        traffic.sent[purpose] += sent
        traffic.calls[purpose] += 1


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


TEXT_BYTES = 4096
"""Room for what one rank was given, when ranks differ and must be told how."""

ERROR_LENGTH = TEXT_BYTES // 8

PURPOSE = "agreement"


def agree(
    facts: Mapping[str, Any] | Exception,
    numbers: Sequence[int],
    group: ProcessGroup | None,
    device: torch.device | str,
) -> list[list[int]]:
    """Refuse on every rank unless all have the same `facts`; give back the `numbers` of each rank.

    A rank that must refuse its own input passes the error instead: it is raised there, and the others learn of it
    instead of waiting. Costs one gathering of 8 bytes and the numbers.
    """
    if isinstance(facts, Exception):
        text = json.dumps({"refused": str(facts)[:ERROR_LENGTH]})
    else:
        text = json.dumps(dict(facts))
    rows = gather(torch.tensor([_digest(text), *numbers], device=device), group, PURPOSE).tolist()
    if any(row[0] != rows[0][0] for row in rows):
        raise _disagreement(facts, text, group, device)
    if isinstance(facts, Exception):
        raise facts
    return [row[1:] for row in rows]


def differences(given: Sequence[Mapping[str, Any]]) -> str:
    """What ranks do not have in common, by rank.

    >>> differences([{"batch": 2, "heads": 8}, {"batch": 3, "heads": 8}])
    'batch is 2 on rank 0 and 3 on rank 1'
    """
    names = {name: None for facts in given for name in facts}  # in order
    unlike = []
    for name in names:
        values = [facts.get(name) for facts in given]
        first = [rank for rank, value in enumerate(values) if value not in values[:rank]]  # one rank for each value
        if len(first) > 1:
            unlike.append(f"{name} is " + " and ".join(f"{values[rank]} on rank {rank}" for rank in first))
    return "; ".join(unlike)


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _disagreement(
    facts: Mapping[str, Any] | Exception, text: str, group: ProcessGroup | None, device: torch.device | str
) -> Exception:
    """Tell all ranks all that was given, and make the error of this one."""
    assert len(text.encode()) <= TEXT_BYTES
    encoded = torch.tensor(list(text.encode().ljust(TEXT_BYTES)), dtype=torch.uint8, device=device)
    given = [json.loads(bytes(row)) for row in gather(encoded, group, PURPOSE).tolist()]
    if isinstance(facts, Exception):
        return facts
    for rank, other in enumerate(given):
        if "refused" in other:
            return ValueError(f"rank {rank} of {rank_and_size(group)[1]} refused its input: {other['refused']}")
    return ValueError(
        f"the ranks do not agree: {differences(given)}. Only the length of a shard may differ from rank to rank; give "
        f"all ranks the same of everything else."
    )
