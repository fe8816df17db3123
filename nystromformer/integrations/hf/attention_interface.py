"""`attn_implementation="nystrom"`: attention of linear cost inside the encoders of Transformers."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from nystromformer.attention import skip_convolution
from nystromformer.attention.longformer import longformer_attention
from nystromformer.attention.shared.common import all_valid, zero_masked
from nystromformer.attention.shared.varlen import as_batch, as_rows, each_alone, packed_input
from nystromformer.attention.standard import standard_attention
from nystromformer.integrations.hf.layer_attentions import assigned_attention, check_layers, layer_choice, listed
from nystromformer.integrations.hf.masks import REMEDY, WindowMask, padding_mask
from nystromformer.integrations.hf.modules import is_causal_module, is_cross_attention, is_surely_self_attention
from nystromformer.integrations.hf.skip_convolution import convolution_kernel
from nystromformer.integrations.offered import (
    OFFERED,
    Choice,
    attention_map,
    check_option_names,
    chosen,
    repeat_heads,
    replacement_of,
    token_mask,
)
from nystromformer.models.flattened import Borders, flattened

OPTIONS_FIELD = "attention_options"
"""The field of a model's configuration for options of the attention, a dict. It is saved with the model."""

LANDMARKS_FIELD = "num_landmarks"
"""The one option that may stand in the configuration by itself."""

HARMLESS = {
    "cache_position",
    "deterministic",
    "encoder_attention_mask",
    "encoder_hidden_states",
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
}
"""What models pass on to every layer and what changes no logit. Anything else that is set is refused by name."""

BORDERS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What tells the sequences of a flattened batch apart."""

CALLED: WeakSet[nn.Module] = WeakSet()
"""The modules that have called one of our functions."""


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
    dropout: float = 0.0  # of the attention weights
    wants_map: bool = False  # the attention matrix is asked for
    borders: Borders | None = None  # of the sequences in a flattened batch, which is one row


def attention_forward(name: str, module: nn.Module, *inputs: Any, **others: Any) -> tuple[Tensor, Tensor | None]:
    """An attention function of Transformers, with the inputs of `read_call`: (b, n, h, d), and the matrix if asked for.

    Options come from `module.config.attention_options`; with enough landmarks the result is exact. Layers with a
    sliding window get exactly that window, in linear time too.
    """
    if not torch.compiler.is_compiling():
        CALLED.add(module)
    call = read_call(module, *inputs, **others)
    replacement = replacement_of(module)
    if call.dropout and module.training:
        if replacement is not None:
            raise ValueError(
                f"{described(module)}: dropout={call.dropout} on attention weights, which attention of linear cost "
                f"never makes; set the attention's dropout to 0."
            )
        warn_about_dropout()
    choice = None if replacement is None else replacement.choice
    attend = attention_of(call, choice or configured_choice(module, name))
    kernel = convolution_kernel(module)
    if not call.wants_map:
        out, weights = attend(call.query, call.key, call.value, conv_weight=kernel), None  # (b h n d)
    else:  # the output comes from the matrix, so that gradients reach it
        weights = attention_map(attend, call.query, call.key)
        out = with_convolution(weights @ call.value, call.value, kernel, call.query_mask)
    return out.transpose(1, 2).contiguous(), weights


FUNCTIONS = {name: partial(attention_forward, name) for name in OFFERED}
"""What `attn_implementation=` may name."""


def register_attention() -> None:
    """Make Transformers know the names of `FUNCTIONS`. Without a mask function of the same name it would drop masks."""
    for name, function in FUNCTIONS.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, padding_mask)


def configured_choice(module: nn.Module, name: str) -> Choice | None:
    """What a module's configuration says of its layer, or of all of them; None for exact attention."""
    config: Any = module.config
    layer = assigned_attention(module)
    if layer is None:
        return Choice(name, configured_options(config, name))
    return layer_choice(layer, stated_options(config))


def configured_options(config: PreTrainedConfig, name: str) -> dict[str, Any]:
    """The options of attention `name` in a model's configuration. Names are checked; values are where they are used."""
    options = stated_options(config)
    check_option_names(name, options)
    return options


def stated_options(config: PreTrainedConfig) -> dict[str, Any]:
    """All options in a model's configuration."""
    options = getattr(config, OPTIONS_FIELD, None) or {}
    if not isinstance(options, dict):
        raise TypeError(f"config.{OPTIONS_FIELD}={options!r}: must be a dict, as {{'num_landmarks': 128}}.")
    landmarks = getattr(config, LANDMARKS_FIELD, None)
    if landmarks is None:
        return options
    if options.get(LANDMARKS_FIELD, landmarks) != landmarks:
        raise ValueError(
            f"config.{OPTIONS_FIELD} has num_landmarks={options[LANDMARKS_FIELD]}, but config.num_landmarks is "
            f"{landmarks}: set one of them, or both to the same number."
        )
    return {**options, LANDMARKS_FIELD: landmarks}


def check_configuration(config: PreTrainedConfig, name: str) -> None:
    """Refuse options that are none of attention `name`, or that have values it can't take."""
    if (layers := listed(config)) is not None:
        check_layers(layers, stated_options(config))
    else:
        chosen(name, configured_options(config, name))


def read_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | WindowMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> AttentionCall:
    """What a module of Transformers asks its attention function for; refused where it can't be had."""
    try:
        if is_causal_use(module, is_causal, attention_mask):
            raise ValueError("is causal: landmarks average over later tokens, so this attention is for encoders.")
        refuse_others(others)
        key, value = repeat_heads("key", key, query), repeat_heads("value", value, query)
        tokens = attention_mask.tokens if isinstance(attention_mask, WindowMask) else attention_mask
        key_mask = token_mask(tokens, key.shape[0], key.shape[2])
        is_cross = is_cross_attention(module, others.get("encoder_hidden_states"))
        query_mask = None if is_cross else query_mask_of(module, query, key, key_mask)
        radius = window_of(module, attention_mask, sliding_window)
        borders = flattened(query.transpose(1, 2), tokens, **{name: others.get(name) for name in BORDERS})
        wants_map = bool(others.get("output_attentions"))
        if borders is not None and (is_cross or wants_map):
            what = "is cross-attention" if is_cross else "is asked for its matrix"
            raise ValueError(f"{what} in a flattened batch, which must be self-attention without output_attentions.")
    except (TypeError, ValueError) as error:
        remedy = REMEDY if replacement_of(module) is None else "leave it out of replace_attention with layers=…"
        raise type(error)(f"{described(module)}: {error} To go without, {remedy}.") from error
    masks = query_mask, key_mask
    return AttentionCall(
        module, query, key, value, *masks, radius, scaling, is_cross, dropout, wants_map, borders=borders
    )


def described(module: nn.Module) -> str:
    """What errors call a module: its class, and its name where `replace_attention` knows it."""
    replacement = replacement_of(module)
    kind = type(module).__name__
    return kind if replacement is None or not replacement.name else f"{replacement.name} ({kind})"


def is_causal_use(module: nn.Module, is_causal: bool | None, mask: object) -> bool:
    """A word in the call goes before one of the module, as in Transformers' own functions."""
    if is_causal is None:
        is_causal = is_causal_module(module)
    return mask is None if is_causal is None else is_causal  # said nowhere: Transformers takes no mask for causal


def refuse_others(others: dict[str, Any]) -> None:
    for name, given in others.items():
        if name not in HARMLESS and name not in BORDERS and given is not None and given is not False:
            raise ValueError(
                f"passes {name} to its attention, which can't honor it, since it never has the logits of all pairs of "
                f"tokens."
            )


def query_mask_of(module: nn.Module, query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor | None:
    """In self-attention queries and keys are the same tokens; otherwise the mask says nothing of the queries."""
    if key_mask is None or query.shape[2] != key.shape[2]:
        return None
    if not is_surely_self_attention(module):
        raise ValueError(
            "can attend to itself or to something else, and does not say which: with a padding mask it can't be "
            "served; pass no mask."
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
            "has a sliding window, but the mask it was given has none: leave masks to the model (attention_mask as "
            "(batch, length))."
        )
    return None


def attention_of(call: AttentionCall, choice: Choice | None) -> Callable[..., Tensor]:
    """What serves a call, masks and window included: a function (query, key, value, conv_weight=None), (b, h, n, e).

    No choice is exact attention.
    """
    if call.borders is not None:
        return partial(row_attention, borders=call.borders, attend=_packed_attention(call, choice))
    if call.radius is not None:
        return partial(window_attention, mask=call.key_mask, radius=call.radius, scale=call.scale)
    if choice is None:
        return partial(padded_attention, query_mask=call.query_mask, key_mask=call.key_mask, scale=call.scale)
    attend: Any = choice.attend
    masks = {"query_mask": call.query_mask, "key_mask": call.key_mask}
    return partial(attend, is_cross=call.is_cross, scale=call.scale, **masks)


def _packed_attention(call: AttentionCall, choice: Choice | None) -> Callable[..., Tensor]:
    """What serves packed sequences, of the signature of `Choice.attend_packed`."""
    if call.radius is None and choice is not None:
        return partial(choice.attend_packed, scale=call.scale)

    def alone(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **convolution: Any) -> Tensor:
        if call.radius is not None:
            return window_attention(query, key, value, mask=mask, radius=call.radius, scale=call.scale, **convolution)
        return padded_attention(query, key, value, query_mask=mask, key_mask=mask, scale=call.scale, **convolution)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, max_seqlen: int | None, **convolution: Any
    ) -> Tensor:
        return each_alone(alone, packed_input(query, key, value, cu_seqlens), max_seqlen, **convolution)

    return attend


def row_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    borders: Borders,
    attend: Callable[..., Tensor],
    conv_weight: Tensor | None = None,
) -> Tensor:
    """Attention within each sequence of the one row of a flattened batch, (1, h, n, e)."""
    rows = (as_rows(x) for x in (query, key, value))
    return as_batch(attend(*rows, borders.cu_seqlens, borders.max_seqlen, conv_weight=conv_weight))


def exact_attention(call: AttentionCall) -> Tensor:
    """Softmax attention as the model means it, windows included: (b, h, n, e), masked rows 0."""
    return attention_of(call, None)(call.query, call.key, call.value)


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    scale: float | None,
    conv_weight: Tensor | None = None,
) -> Tensor:
    """Exact attention, (b, h, n, e). What is padding may hold anything."""
    if key_mask is not None and query_mask is None:
        query_mask = all_valid(query)
    out = standard_attention(query, key, value, query_mask=query_mask, key_mask=key_mask, scale=scale)
    return with_convolution(out, value, conv_weight, query_mask)


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
    out = longformer_attention(query, key, value, mask, window=2 * radius + 1, scale=scale)
    return with_convolution(out, value, conv_weight, mask)


def with_convolution(out: Tensor, value: Tensor, conv_weight: Tensor | None, mask: Tensor | None) -> Tensor:
    """`out` (b, h, n, e) of self-attention plus the skip convolution of the values, where there is one."""
    if conv_weight is None:
        return out
    return zero_masked(out + skip_convolution(zero_masked(value, mask), conv_weight), mask)


@cache
def warn_about_dropout() -> None:
    """Once per process."""
    warnings.warn(
        "The model asks for dropout on attention probabilities. This attention never has them, so there is none; set "
        "the model's attention dropout to 0 to say so. Dropout elsewhere works as before.",
        stacklevel=3,
    )
