"""Cases for sequence-parallel attention: what each is, alone and on ranks."""

from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from nystromformer import nystrom_attention
from nystromformer.distributed import attention as parallel
from nystromformer.distributed import count_traffic, sequence_parallel_nystrom_attention


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]  # of each rank's shard
    landmarks: int = 8
    kernel: int | None = 5
    valid: float | None = None  # share of valid tokens; None: no masks
    masked_ranks: tuple[int, ...] = ()  # wholly masked shards
    mask_only_on: int | None = None  # the others give no mask
    empty_example: bool = False  # no valid token in the first example
    key_lengths: tuple[int, ...] | None = None  # cross-attention
    query_valid: float | None = None  # another mask for queries
    widths: tuple[int, int] = (4, 4)  # of queries and keys, of values
    spread: float = 1.0
    scaling: str = "matrix"
    pieces: int | None = None  # keys at once, as on devices without a fused kernel
    members: tuple[int, ...] = (0, 1, 2)  # which processes make the group
    frozen: bool = False  # only the kernel has a gradient
    dtype: torch.dtype = torch.float64


CASES = {
    "uneven": Case((13, 20, 7)),
    "even": Case((16, 16, 16), landmarks=16, kernel=33),
    "two-ranks": Case((23, 30), members=(0, 1)),
    "two-ranks-of-three": Case((23, 30), members=(0, 2), valid=0.6),
    "one-rank": Case((41,), members=(1,)),
    "mask-with-holes": Case((13, 20, 7), valid=0.6),
    "mask-on-one-rank-only": Case((13, 20, 7), valid=0.6, mask_only_on=1),
    "wholly-masked-shard": Case((13, 20, 7), valid=0.8, masked_ranks=(1,)),
    "wholly-masked-first-and-last": Case((13, 30, 7), valid=0.8, masked_ranks=(0, 2)),
    "empty-first-shard": Case((0, 30, 11), valid=0.8),
    "empty-shard-between": Case((25, 0, 16), kernel=9),
    "empty-last-shards": Case((41, 0, 0), valid=0.8),
    "kernel-wider-than-shards": Case((3, 40, 2), kernel=33),
    "kernel-wider-than-everything": Case((4, 5, 3), kernel=65, landmarks=3),
    "kernel-across-an-empty-shard": Case((20, 0, 21), kernel=15, valid=0.7),
    "kernel-of-one": Case((13, 20, 7), kernel=1),
    "no-convolution": Case((13, 20, 7), kernel=None, valid=0.6),
    "fewer-tokens-than-landmarks": Case((3, 2, 4), landmarks=16),
    "few-valid-tokens": Case((20, 9, 14), landmarks=16, valid=0.2),
    "as-many-tokens-as-landmarks": Case((7, 6, 3), landmarks=16),
    "some-examples-exact": Case((12, 12, 12), landmarks=18, valid=0.5),
    "an-example-without-a-valid-token": Case((13, 20, 7), valid=0.6, empty_example=True),
    "cross-attention": Case((13, 20, 7), key_lengths=(25, 8, 31), kernel=None),
    "cross-attention-few-queries": Case((2, 3, 1), key_lengths=(25, 8, 31), kernel=None, valid=0.7),
    "cross-attention-few-keys": Case((25, 8, 31), key_lengths=(2, 0, 3), kernel=None),
    "other-masks-for-queries": Case((13, 20, 7), landmarks=14, valid=0.7, query_valid=0.3),
    "wide-values": Case((13, 20, 7), widths=(4, 7), valid=0.7),
    "narrow-values": Case((13, 20, 7), widths=(5, 2)),
    "peaked-softmax": Case((13, 20, 7), spread=6.0, valid=0.8),
    "batch-scaling": Case((13, 20, 7), scaling="batch"),
    "keys-in-pieces": Case((13, 20, 7), pieces=6, valid=0.7),
    "only-the-kernel-learns": Case((13, 20, 7), frozen=True, valid=0.7),
    "long": Case((300, 211, 257), landmarks=32, kernel=33, valid=0.9),
    "float32": Case((130, 100, 57), landmarks=16, valid=0.9, dtype=torch.float32),
    "bfloat16": Case((130, 100, 57), landmarks=16, valid=0.9, dtype=torch.bfloat16),
}


@dataclass
class Whole:
    """The tensors of a case for one process, and the gradient that arrives at the output."""

    tensors: list[Tensor]  # query, key, value
    query_mask: Tensor | None
    key_mask: Tensor | None
    kernel: Tensor | None
    grad: Tensor

    def masks(self) -> dict[str, Tensor]:
        masks = {"query_mask": self.query_mask, "key_mask": self.key_mask}
        return {name: mask for name, mask in masks.items() if mask is not None}


def whole(case: Case) -> Whole:
    generator = torch.Generator().manual_seed(len(case.lengths) + sum(case.lengths))
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)
    n, s = sum(case.lengths), sum(case.key_lengths or case.lengths)
    (d, e), heads = case.widths, 2
    tensors = [draw(2, heads, n, d) * case.spread, draw(2, heads, s, d), draw(2, heads, s, e)]
    key_mask = None if case.valid is None else _mask(case, case.key_lengths or case.lengths, case.valid, generator)
    query_mask = key_mask if case.key_lengths is None else None
    if case.query_valid is not None:
        query_mask = _mask(case, case.lengths, case.query_valid, generator)
    kernel = None if case.kernel is None else draw(heads, case.kernel)
    return Whole(tensors, query_mask, key_mask, kernel, draw(2, heads, n, e))


def _mask(case: Case, lengths: tuple[int, ...], share: float, generator: torch.Generator) -> Tensor:
    parts = []
    for rank, length in enumerate(lengths):
        part = torch.rand(2, length, generator=generator) < share
        if case.mask_only_on not in (None, rank):
            part = torch.ones(2, length, dtype=torch.bool)
        parts.append(part & (rank not in case.masked_ranks))
    mask = torch.cat(parts, dim=1)
    mask[0] &= not case.empty_example
    return mask


def in_one_process(case: Case) -> dict[str, Tensor]:
    """Output and gradients of `nystrom_attention`."""
    given = whole(case)
    leaves = [x.clone().requires_grad_(not case.frozen) for x in given.tensors]
    kernel = None if given.kernel is None else given.kernel.clone().requires_grad_()
    out = nystrom_attention(
        *leaves, num_landmarks=case.landmarks, conv_weight=kernel, pinv_scaling=case.scaling, **given.masks()
    )
    (out * given.grad).sum().backward()
    return _results(out, leaves, kernel)


def on_ranks() -> dict[str, dict[str, Tensor]]:
    """Output, gradients and bytes of every case, at this rank's rows. Runs on three ranks."""
    members = {case.members for case in CASES.values()}
    groups = {ranks: dist.new_group(list(ranks)) for ranks in sorted(members)}
    return {
        name: _on_this_rank(case, groups[case.members])
        for name, case in CASES.items()
        if dist.get_rank() in case.members
    }


def _on_this_rank(case: Case, group: dist.ProcessGroup) -> dict[str, Tensor]:
    rank, given = dist.get_rank(group), whole(case)
    queries = _rows(case.lengths, rank)
    keys = _rows(case.key_lengths or case.lengths, rank)
    rows = [queries, keys, keys]
    leaves = [x[:, :, part].clone() for x, part in zip(given.tensors, rows, strict=True)]
    leaves = [x.requires_grad_(not case.frozen) for x in leaves]
    kernel = None if given.kernel is None else given.kernel.clone().requires_grad_()
    masks = [
        None if mask is None or case.mask_only_on not in (None, rank) else mask[:, part]
        for mask, part in ((given.query_mask, queries), (given.key_mask, keys))
    ]
    with mock.patch.multiple(
        parallel, FUSED_DEVICES=() if case.pieces else parallel.FUSED_DEVICES, KEYS_AT_ONCE=case.pieces or 8192
    ):
        out = sequence_parallel_nystrom_attention(
            *leaves,
            num_landmarks=case.landmarks,
            query_mask=masks[0],
            key_mask=masks[1],
            conv_weight=kernel,
            pinv_scaling=case.scaling,
            group=group,
        )
    (out * given.grad[:, :, queries]).sum().backward()
    return _results(out, leaves, kernel)


def _rows(lengths: tuple[int, ...], rank: int) -> slice:
    return slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))


def _results(out: Tensor, leaves: list[Tensor], kernel: Tensor | None) -> dict[str, Tensor]:
    names = ("query", "key", "value")
    learning = {name: x.grad for name, x in zip(names, leaves, strict=True) if x.requires_grad}
    results = {"out": out.detach()} | learning
    return results if kernel is None else results | {"kernel": kernel.grad}


def sent_for_lengths(lengths: list[int]) -> list[tuple[dict[str, int], int]]:
    """What this rank sends for self-attention over so many tokens, forward and backward: as counted, and in all."""
    from ranks import sent_by_sockets

    found = []
    for length in lengths:
        x = torch.randn(2, 4, length, 16, requires_grad=True)
        kernel = torch.randn(4, 9, requires_grad=True)
        dist.barrier()
        before = sent_by_sockets()
        with count_traffic() as traffic:
            sequence_parallel_nystrom_attention(x, x, x, num_landmarks=16, conv_weight=kernel).sum().backward()
        dist.barrier()  # until all have received all: what a slow receiver has not taken yet waits here, uncounted
        found.append((dict(traffic.sent), sent_by_sockets() - before))
    dist.barrier()  # a rank that leaves closes its sockets, and with them those that others are still counting
    return found
