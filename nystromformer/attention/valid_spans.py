"""Padded batches on a CPU: each example is computed alone, on its valid tokens.

A batch that is padded to its longest example spends its time on padding as on tokens, and masks cost copies of all
queries, keys and values. Where each example's valid tokens stand together, as padding at an end leaves them, and where
reading the mask does not wait for a device, both can be avoided.
"""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

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
    if mask is None or not _is_readable(mask) or ways * tokens.shape[1:].numel() < SMALLEST_EXAMPLE:
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


def attend_to_spans(attend: Callable[..., Tensor], spans: list[tuple[int, int]], *tensors: Tensor) -> Tensor:
    """`attend` of each example's span alone, in its place in a result (b, h, n, e) of zeros.

    `attend` gets (1, h, l, d) of `tensors` (b, h, n, d) and gives (1, h, l, e), with no mask left to heed. Where there
    is no padding at all it gets the batch together.
    """
    batch, length = tensors[0].shape[0], tensors[0].shape[2]
    if all(after - first == length for first, after in spans):
        return attend(*tensors)
    sizes = list(chain.from_iterable((first, after - first, length - after) for first, after in spans))
    examples = zip(*(_rows(x).split(sizes)[1::3] for x in tensors), strict=True)
    pieces = []
    for example, (first, after) in zip(examples, spans, strict=True):
        out = example[-1]  # of an example without tokens: nothing
        if first < after:
            out = attend(*(x.transpose(0, 1)[None] for x in example))[0].transpose(0, 1)  # (l h e)
        pieces += [out.new_zeros(first, *out.shape[1:]), out, out.new_zeros(length - after, *out.shape[1:])]
    return torch.cat(pieces).unflatten(0, (batch, length)).transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """(b, h, n, d) → (b·n, h, d), a view where it has the layout of projections."""
    return x.transpose(1, 2).flatten(0, 1)


def _is_readable(mask: Tensor) -> bool:
    in_python = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    return in_python and mask.device.type == "cpu" and type(mask) is Tensor
