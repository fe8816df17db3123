"""Masks are boolean (b, n), True for a real token. These helpers apply them to (b, h, n, d)."""

import torch
from torch import Tensor


def zero_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` (b, h, n, d) with its masked rows set to exactly 0, whatever they held, NaN and infinity included.

    >>> zero_padding(torch.tensor([[[[1.0], [float("nan")]]]]), torch.tensor([[True, False]])).flatten()
    tensor([1., 0.])
    """
    if mask is None:
        return x
    return torch.where(mask[:, None, :, None], x, torch.zeros((), dtype=x.dtype, device=x.device))


def attendable(mask: Tensor | None) -> Tensor | None:
    """The mask over keys to hand to a softmax: (b, 1, 1, s), with everything allowed where no key is valid.

    A softmax over nothing is 0/0. Where an example has no valid key its values are all zero (`zero_padding`), so
    attending to all of them gives the right answer, 0, and finite gradients.
    """
    if mask is None:
        return None
    return (mask | ~mask.any(dim=1, keepdim=True))[:, None, None, :]
