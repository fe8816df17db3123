"""`attn_implementation="nystrom"`: Nyström attention inside the encoders of Transformers."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from nystromformer.attention import nystrom_attention, nystrom_local_attention, skip_convolution
from nystromformer.attention.common import zero_masked
from nystromformer.attention.longformer import longformer_attention
from nystromformer.attention.nystrom import NystromOptions
from nystromformer.integrations.hf_masks import REMEDY, WindowMask, padding_mask, token_mask
from nystromformer.integrations.hf_modules import is_causal_module, is_cross_attention, is_surely_self_attention
from nystromformer.integrations.skip_convolution import convolution_kernel
from nystromformer.models.encoder import LONGEST

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


CALLED: WeakSet[nn.Module] = WeakSet()
"""The modules that have called one of our functions."""


def attention_forward(
    operation: Callable[..., Tensor],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | WindowMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: object,
) -> tuple[Tensor, Tensor | None]:
    """An attention function of Transformers around `operation`: (b, n, h, d), and the attention matrix if asked for.

    `module.config.num_landmarks` sets the landmarks, 64 without it; with as many as tokens, or more, the result is
    exact. Layers with a sliding window get exactly that window, in linear time too.
    """
    if not torch.compiler.is_compiling():
        CALLED.add(module)
    call = read_call(module, query, key, value, attention_mask, scaling, is_causal, sliding_window, others)
    if dropout and module.training:
        warn_about_dropout()
    landmarks = getattr(module.config, "num_landmarks", NystromOptions().num_landmarks)
    attend = attention_of(call, operation, landmarks)
    out = attend(call.query, call.key, call.value, conv_weight=convolution_kernel(module))  # (b h n d)
    weights = attention_map(attend, call.query, call.key) if others.get("output_attentions") else None
    return out.transpose(1, 2).contiguous(), weights


OPERATIONS = {"nystrom": nystrom_attention, "nystrom-local": nystrom_local_attention}
"""What `attn_implementation=` may name."""

FUNCTIONS = {name: partial(attention_forward, operation) for name, operation in OPERATIONS.items()}

nystrom_attention_forward = FUNCTIONS["nystrom"]


def register_attention() -> None:
    """Make Transformers know the names of `FUNCTIONS`. Without a mask function of the same name it would drop masks."""
    for name, function in FUNCTIONS.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, padding_mask)


def attention_of(call: AttentionCall, operation: Callable[..., Tensor], num_landmarks: int) -> Callable[..., Tensor]:
    """What serves a call, masks and window included: a function (query, key, value, conv_weight=None), (b, h, n, e)."""
    if call.radius is not None:
        return partial(window_attention, mask=call.key_mask, radius=call.radius, scale=call.scale)
    if call.is_cross and operation is nystrom_local_attention:
        raise ValueError(
            f"{type(call.module).__name__} is cross-attention: nystrom-local is for self-attention, where queries have "
            f"neighbours among the keys; use attn_implementation='nystrom'."
        )
    masks = {"query_mask": call.query_mask, "key_mask": call.key_mask}
    return partial(operation, num_landmarks=num_landmarks, scale=call.scale, **masks)


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    radius: int,
    scale: float | None,
    conv_weight: Tensor | None = None,
) -> Tensor:
    """Exact attention of each token to those at most `radius` away, (b, h, n, d)."""
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries and {key.shape[2]} keys in a layer with a sliding window: must be as many; "
            f"{REMEDY}."
        )
    if scale is not None:
        query = query * (scale * query.shape[3] ** 0.5)
    out = longformer_attention(query, key, value, mask, window=2 * radius + 1)
    if conv_weight is None:
        return out
    return zero_masked(out + skip_convolution(zero_masked(value, mask), conv_weight), mask)


def attention_map(attend: Callable[..., Tensor], query: Tensor, key: Tensor) -> Tensor:
    """The matrix (b, h, n, s) that `attend` multiplies values with: its result for the identity in place of values."""
    batch, heads, length = key.shape[:3]
    if max(length, query.shape[2]) > LONGEST:
        raise ValueError(
            f"output_attentions=True with {length} tokens: at most {LONGEST}, since the matrices grow with the square "
            f"of the length; ask for single rows with nystromformer.nystrom_attention_weights(query, key, rows=[0])."
        )
    identity = torch.eye(length, dtype=query.dtype, device=query.device).expand(batch, heads, length, length)
    return attend(query, key, identity)


@cache
def warn_about_dropout() -> None:
    """Once a process."""
    warnings.warn(
        "The model asks for dropout on attention probabilities. This attention never has them, so there is none; set "
        "the model's attention dropout to 0 to say so. Dropout elsewhere works as before.",
        stacklevel=3,
    )
