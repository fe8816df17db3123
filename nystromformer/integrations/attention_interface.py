"""`attn_implementation="nystrom"`: Nyström attention inside the encoders of Transformers."""

import warnings
from collections.abc import Callable
from functools import cache, partial
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from nystromformer.attention import nystrom_attention, nystrom_local_attention, skip_convolution
from nystromformer.attention.longformer import longformer_attention
from nystromformer.attention.masks import zero_padding
from nystromformer.attention.nystrom_core import NystromOptions
from nystromformer.integrations.added_convolution import convolution_kernel
from nystromformer.integrations.interface_calls import AttentionCall, read_call
from nystromformer.integrations.interface_masks import REMEDY, WindowMask, padding_mask
from nystromformer.models.encoder.attention_maps import LONGEST

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
    return zero_padding(out + skip_convolution(zero_padding(value, mask), conv_weight), mask)


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
