"""Hugging Face's `attention_mask` becomes our boolean mask here, once."""

import torch
from torch import Tensor

from nystromformer.attention.checks import shape_of


def token_mask(attention_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """`attention_mask` (b, n) of 0 and 1, or booleans, as a boolean mask with True for real tokens.

    None where nothing is masked, as far as that can be told without waiting for a device or breaking a graph: the
    unmasked attention is faster.

    >>> token_mask(torch.tensor([[1, 1, 0]]), 1, 3)
    tensor([[ True,  True, False]])
    >>> token_mask(torch.tensor([[1, 1, 1]]), 1, 3) is None
    True
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask is a {type(attention_mask).__name__}: must be a tensor ({batch}, {length}).")
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] != length:
        raise ValueError(
            f"attention_mask has shape {shape_of(attention_mask)}: must be ({batch}, {length}), 1 for real tokens and "
            f"0 for padding; masks over pairs of tokens (4-D or causal ones) do not fit attention of linear cost."
        )
    if attention_mask.is_floating_point() or attention_mask.is_complex():
        raise TypeError(
            f"attention_mask has dtype {attention_mask.dtype}: must be boolean or whole numbers, 1 for real tokens; "
            f"convert a 0/1 mask with mask.bool() and an additive one with mask == 0."
        )
    can_look = attention_mask.device.type == "cpu" and not torch.compiler.is_compiling()
    if can_look and attention_mask.dtype != torch.bool and bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise ValueError(
            "attention_mask has values besides 0 and 1: must be 1 for real tokens and 0 for padding; sequences packed "
            "into one row can't be kept apart."
        )
    mask = attention_mask.bool()
    return None if can_look and bool(mask.all()) else mask
