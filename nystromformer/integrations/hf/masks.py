"""Mask functions of Transformers: what linear attention can honor, and a refusal of all others.

Transformers describes a mask by a function over pairs of tokens. Linear attention has no place for pairs, so just two
kinds are served: padding, which stays a boolean (b, s), and padding with a window around each token, as in the local
layers of ModernBERT. Everything else is refused: a mask that is dropped changes results without a word.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_bidirectional_overlay,
)

from nystromformer.attention.shared.common import shape_of

REMEDY = 'load the model with attn_implementation="sdpa" instead'

# Functions that Transformers makes at run time are known by their code alone.
AND_MASKS, WINDOW = and_masks().__code__, sliding_window_bidirectional_overlay(0).__code__


@dataclass(frozen=True)
class WindowMask:
    """A padding mask for layers where tokens see those at most `radius` away. An object of its own, as flex attention's
    block masks are: a plain tensor that lost its window on the way would be taken for full attention."""

    radius: int
    tokens: Tensor | None  # (b, s), True for real tokens

    def to(self, *args: Any, **kwargs: Any) -> "WindowMask":
        """For Accelerate, which moves what a layer is given to the layer's device."""
        return self if self.tokens is None else replace(self, tokens=self.tokens.to(*args, **kwargs))


def padding_mask(
    *,
    mask_function: Callable,
    kv_length: int,
    attention_mask: Tensor | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    **described: Any,
) -> Tensor | WindowMask | None:
    """The mask function that `AttentionMaskInterface` knows for our attentions. Causal and custom masks are refused.

    >>> real = torch.tensor([[True, False]])
    >>> padding_mask(mask_function=bidirectional_mask_function, kv_length=2, attention_mask=real)
    tensor([[ True, False]])
    """
    radius = window_radius(mask_function)
    if isinstance(q_offset, Tensor) or q_offset or kv_offset:
        raise ValueError(
            f"past_key_values hold earlier tokens: this attention looks at whole sequences and can't be continued "
            f"token by token; pass use_cache=False, or {REMEDY}."
        )
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[1] != kv_length:
            raise ValueError(
                f"attention_mask has shape {shape_of(attention_mask)}: must be (batch, {kv_length}), 1 for real tokens "
                f"and 0 for padding."
            )
        attention_mask = attention_mask.bool()
        if not torch.compiler.is_compiling() and bool(attention_mask.all()):
            attention_mask = None  # the attention is faster where it knows that nothing is padding
    return attention_mask if radius is None else WindowMask(radius, attention_mask)


def window_radius(mask_function: Callable) -> int | None:
    """How far tokens see under a mask function of Transformers: None for everywhere; all but windows is refused.

    >>> from transformers.masking_utils import sliding_window_bidirectional_mask_function
    >>> window_radius(sliding_window_bidirectional_mask_function(64))
    64
    """
    if mask_function is bidirectional_mask_function:
        return None
    parts: tuple[Any, ...] = _captured(mask_function) if _code(mask_function) is AND_MASKS else ()
    if len(parts) == 2 and _code(parts[0]) is WINDOW and parts[1] is bidirectional_mask_function:
        return _captured(parts[0])
    if mask_function is causal_mask_function or causal_mask_function in parts:
        raise ValueError(
            f"a causal mask was asked for: landmarks average over later tokens, so this attention can't be causal; "
            f"{REMEDY}. It is for encoders."
        )
    raise ValueError(
        f"the mask function {getattr(mask_function, '__qualname__', mask_function)!r} was asked for: must be full "
        f"bidirectional attention or a bidirectional sliding window, because attention of linear cost has no place for "
        f"other masks over pairs of tokens; {REMEDY}."
    )


def _code(function: Callable) -> object:
    return getattr(function, "__code__", None)


def _captured(function: Any) -> Any:
    """What the one free variable of a function made at run time holds."""
    return function.__closure__[0].cell_contents
