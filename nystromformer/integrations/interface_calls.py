"""What a model of Transformers hands to its attention function, read, checked and made ready for linear attention.

A function that ignores something it is handed gives other results without a word. So what can't be honoured is refused:
causal use, biases on the logits, masks over pairs of tokens, windows that got lost.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from nystromformer.integrations.interface_masks import REMEDY, WindowMask, token_mask
from nystromformer.integrations.interface_modules import (
    is_causal_module,
    is_cross_attention,
    is_surely_self_attention,
)

HARMLESS = {
    "cache_position",
    "deterministic",
    "encoder_attention_mask",
    "encoder_hidden_states",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "position_ids",
    "return_dict",
    "use_cache",
}
"""What models pass on to every layer and what changes no logit. Anything else that is set is refused by name."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function."""

    module: nn.Module
    query: Tensor  # (b h n d)
    key: Tensor  # (b h s d), grouped ones repeated
    value: Tensor  # (b h s e)
    query_mask: Tensor | None  # (b, n), True for real tokens
    key_mask: Tensor | None  # (b, s)
    radius: int | None  # how far tokens see in a layer with a sliding window
    scale: float | None  # of the logits, d ** -0.5 if None
    is_cross: bool = False  # queries and keys are surely not of one sequence


def read_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | WindowMask | None,
    scaling: float | None,
    is_causal: bool | None,
    sliding_window: int | None,
    others: dict[str, object],
) -> AttentionCall:
    if is_causal_use(module, is_causal, attention_mask):
        raise ValueError(
            f"{type(module).__name__} is causal: landmarks average over later tokens, so this attention can't be; "
            f"{REMEDY}. It is for encoders."
        )
    refuse_others(others)
    key, value = repeat_heads("key", key, query), repeat_heads("value", value, query)
    key_mask = token_mask(attention_mask, key.shape[0], key.shape[2])
    is_cross = is_cross_attention(module, others.get("encoder_hidden_states"))
    query_mask = None if is_cross else query_mask_of(module, query, key, key_mask)
    radius = window_of(module, attention_mask, sliding_window)
    return AttentionCall(module, query, key, value, query_mask, key_mask, radius, scaling, is_cross)


def is_causal_use(module: nn.Module, is_causal: bool | None, mask: object) -> bool:
    """A word in the call goes before one of the module, as in Transformers' own functions."""
    if is_causal is None:
        is_causal = is_causal_module(module)
    return mask is None if is_causal is None else is_causal  # said nowhere: Transformers takes no mask for causal


def refuse_others(others: dict[str, object]) -> None:
    for name, given in others.items():
        if name not in HARMLESS and given is not None and given is not False:
            raise ValueError(
                f"the model passes {name} to its attention: this attention can't honour it, since it never has the "
                f"logits of all pairs of tokens; {REMEDY}."
            )


def repeat_heads(name: str, grouped: Tensor, query: Tensor) -> Tensor:
    """Keys or values (b, g, s, d) that several query heads share, repeated to (b, h, s, d)."""
    groups, heads = grouped.shape[1], query.shape[1]
    if groups == heads:
        return grouped
    if heads % groups:
        raise ValueError(
            f"{name} has {groups} heads and query {heads}: the query's must be a multiple, so that groups share one."
        )
    return grouped.repeat_interleave(heads // groups, dim=1)


def query_mask_of(module: nn.Module, query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """In self-attention queries and keys are the same tokens; else the mask says nothing of the queries."""
    if key_mask is None or query.shape[2] != key.shape[2]:
        return None
    if not is_surely_self_attention(module):
        raise ValueError(
            f"{type(module).__name__} can attend to itself or to something else, and does not say which: with a "
            f"padding mask it can't be served; pass no mask, or {REMEDY}."
        )
    return key_mask


def window_of(module: nn.Module, mask: Tensor | WindowMask | None, sliding_window: int | None) -> int | None:
    """The radius of a layer's window. It comes with the mask alone, where Transformers says exactly who sees whom: what
    modules hold is one more in some models, for flash attention. They just tell that there must be a window."""
    if isinstance(mask, WindowMask):
        return mask.radius
    layer, types = getattr(module, "layer_idx", None), getattr(module.config, "layer_types", None)
    local = isinstance(layer, int) and types is not None and types[layer] == "sliding_attention"
    if local or sliding_window is not None or getattr(module, "sliding_window", None) is not None:
        raise ValueError(
            f"{type(module).__name__} has a sliding window, but the mask it was given has none: leave masks to the "
            f"model (attention_mask as (batch, length)), or {REMEDY}."
        )
    return None
