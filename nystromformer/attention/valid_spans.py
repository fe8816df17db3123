"""Padded batches on a CPU: each example is computed alone, on its valid tokens.

A batch that is padded to its longest example spends its time on padding as on tokens, and masks cost copies of all
queries, keys and values. Where each example's valid tokens stand together, as padding at an end leaves them, and where
reading the mask does not wait for a device, both can be avoided.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor

from nystromformer.attention.native.library import large_pages

SMALLEST_EXAMPLE = 2**19
"""Queries of one padded example, n·h·d numbers, from which on its own calls cost less than its padding."""


def valid_spans(mask: Tensor | None, tokens: Tensor, ways: int = 1) -> list[tuple[int, int]] | None:
    """Where each example's valid tokens begin and end, for `mask` (b, n) and `tokens` (b, h, n, d).

    None where the batch is better computed as a whole: without a mask, for small examples, where valid tokens have
    padding between them, and where Python can't look at the mask: on other devices, in graphs, under `torch.func`.
    `ways` is in how many ways the whole would be computed: 2 where some examples are to be exact (`exact_below`).

    >>> mask = torch.arange(4096) < torch.tensor([[1000], [4096]])
    >>> valid_spans(mask, torch.zeros(2, 8, 4096, 64))
    [(0, 1000), (0, 4096)]
    """
    if mask is None or not is_readable(mask) or ways * tokens.shape[1:].numel() < SMALLEST_EXAMPLE:
        return None
    length = mask.shape[1]
    place = torch.arange(length)
    first = torch.where(mask, place, length).amin(1)
    after = torch.where(mask, place + 1, 0).amax(1)
    valid = mask.sum(1)
    first, after = torch.where(valid > 0, torch.stack((first, after)), 0)
    if (after - first != valid).any():
        return None
    return list(zip(first.tolist(), after.tolist(), strict=True))


def attend_to_spans(attend: Callable[..., Sequence[Tensor]], spans: list[tuple[int, int]], *tensors: Tensor) -> Tensor:
    """`attend` of each example's span alone, in its place in a result (b, h, n, e) of zeros.

    `attend` gets, for each of `tensors` (b, h, n, d), a list of (1, h, l, d), and gives a list of (1, h, l, e), with no
    mask left to heed. Where there is no padding at all it gets the batch together.
    """
    batch, length = tensors[0].shape[0], tensors[0].shape[2]
    if all(after - first == length for first, after in spans):
        return attend(*([x] for x in tensors))[0]
    sizes = list(chain.from_iterable((first, after - first, length - after) for first, after in spans))
    examples = [[as_batch(rows) for rows in _rows(x).split(sizes)[1::3] if len(rows)] for x in tensors]
    if not torch.is_grad_enabled():
        # One after the other: memory of a result that is in its place already serves the next one.
        return _placed((attend(*([x] for x in each))[0] for each in zip(*examples, strict=True)), spans, tensors[-1])
    outs = iter(attend(*examples) if examples[0] else ())
    nothing = tensors[-1].new_zeros(0, *tensors[-1].shape[1::2])
    pieces = []
    for first, after in spans:
        out = as_rows(next(outs)) if first < after else nothing  # (l h e)
        pieces += [out.new_zeros(first, *out.shape[1:]), out, out.new_zeros(length - after, *out.shape[1:])]
    return torch.cat(pieces).unflatten(0, (batch, length)).transpose(1, 2)


def _placed(outs: Iterator[Tensor], spans: list[tuple[int, int]], like: Tensor) -> Tensor:
    """Each of `outs` in its span, zeros around it, written once each; as `like` (b, h, n, e)."""
    batch, heads, length, width = like.shape
    result = large_pages(like.new_empty(batch, length, heads, width))
    for rows, (first, after) in zip(result, spans, strict=True):
        rows[:first].zero_()
        rows[after:].zero_()
        if first < after:
            rows[first:after] = as_rows(next(outs))
    return result.transpose(1, 2)


def as_batch(rows: Tensor) -> Tensor:
    """One sequence (l, h, d) as a batch (1, h, l, d), a view."""
    return rows.transpose(0, 1)[None]


def as_rows(batch: Tensor) -> Tensor:
    """A batch (1, h, l, d) of one sequence as (l, h, d), a view."""
    return batch[0].transpose(0, 1)


def is_readable(x: Tensor) -> bool:
    """Whether Python can look at what `x` holds without waiting for a device: not in graphs or under `torch.func`."""
    in_python = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    return in_python and x.device.type == "cpu" and type(x) is Tensor


def _rows(x: Tensor) -> Tensor:
    """(b, h, n, d) → (b·n, h, d), a view where it has the layout of projections."""
    return x.transpose(1, 2).flatten(0, 1)
