"""Masks that were made for exact attention, as one flag for each token; all that such flags can't say is refused.

A mask that is dropped, or read as another, would change results without a word.
"""

import torch
from torch import Tensor

from nystromformer.attention.common import shape_of

MASKED_FROM = -1e4
"""Additive masks hold 0 for real tokens and at most this for padding; weights of e^-10000 are 0 in any precision."""


def token_mask(attention_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """The boolean mask (b, s) over keys in whatever exact attention would have been given.

    That is (b, s), or (b, 1, 1, s) as models make it, or (b, h, n, s) where it is the same for all heads and queries;
    boolean or whole numbers with True for real tokens, or additive with 0 for them.

    >>> token_mask(torch.tensor([[[[0.0, -torch.inf]]]]), batch=1, length=2)
    tensor([[ True, False]])
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"the attention mask is a {type(attention_mask).__name__}: must be a torch.Tensor.")
    if attention_mask.dim() == 4:
        attention_mask = _one_row(attention_mask)
    if attention_mask.shape not in ((batch, length), (1, length)):
        raise ValueError(
            f"the attention mask has shape {shape_of(attention_mask)}: must be ({batch}, {length}) or ({batch}, 1, 1, "
            f"{length}), one flag for each token."
        )
    return as_boolean(attention_mask).expand(batch, length)


def as_boolean(mask: Tensor) -> Tensor:
    """A mask with True for real tokens, from one that may be additive."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask.bool()
    real = mask == 0
    if not bool((real | (mask <= MASKED_FROM)).all()):
        raise ValueError(
            f"the attention mask has entries between {MASKED_FROM:g} and 0 or above: must be 0 for real tokens and "
            f"-inf for padding, because a bias on the logits has no place in attention of linear cost."
        )
    return real


def _one_row(mask: Tensor) -> Tensor:
    """(b, s) of a mask (b, h, n, s) that is the same for all heads and queries."""
    for axis in (1, 2):
        if mask.shape[axis] == 1 or mask.stride(axis) == 0:
            continue
        if torch.compiler.is_compiling() or not bool((mask == mask.narrow(axis, 0, 1)).all()):
            raise ValueError(
                f"the attention mask has shape {shape_of(mask)}, one entry for each pair of tokens: must be padding, "
                f"as (batch, length) or (batch, 1, 1, length), because attention of linear cost has no place for pairs."
            )
    return mask[:, 0, 0]
