"""Run a model of Transformers with any attention in place of its own, or look at what its attention is given."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from nystromformer.attention import skip_convolution
from nystromformer.attention.masks import attendable, zero_padding
from nystromformer.integrations.added_convolution import convolution_kernel
from nystromformer.integrations.attention_interface import window_attention
from nystromformer.integrations.guarded_models import refuse
from nystromformer.integrations.interface_calls import AttentionCall, read_call
from nystromformer.integrations.interface_masks import WindowMask, padding_mask
from nystromformer.integrations.interface_modules import interface_modules

NAME = "nystromformer-substitute"
Attend = Callable[[AttentionCall], Tensor]
_current: ContextVar[Attend] = ContextVar("attention that stands in for a model's own")


@contextmanager
def substituted(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Inside, `model` uses `attend`, which turns an `AttentionCall` into (b, h, n, e).

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8))
    >>> with substituted(model, lambda call: torch.zeros_like(call.query)):
    ...     output = model(torch.tensor([[1, 2, 3]]))
    """
    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, padding_mask)
    modules = list(interface_modules(model))
    if not modules:
        refuse(model)
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    configs = {id(part.config): part.config for part in [*modules, *parts]}.values()
    before = [config._attn_implementation for config in configs]
    token = _current.set(attend)
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield
    finally:
        _current.reset(token)
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def capture(model: PreTrainedModel, **inputs: Tensor) -> tuple[list[AttentionCall], object]:
    """All calls of its attention in one forward of `model` with exact attention, and the model's output."""
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> Tensor:
        calls.append(call)
        return exact_attention(call)

    with substituted(model, attend), torch.no_grad():
        output = model(**inputs)
    if not calls:
        refuse(model)
    return calls, output


def exact_attention(call: AttentionCall) -> Tensor:
    """Softmax attention as the model means it, windows included: (b, h, n, e), masked rows 0."""
    if call.radius is not None:
        window = {"mask": call.key_mask, "radius": call.radius, "scale": call.scale}
        return window_attention(call.query, call.key, call.value, **window)
    query, key, value = (
        zero_padding(x, mask)
        for x, mask in ((call.query, call.query_mask), (call.key, call.key_mask), (call.value, call.key_mask))
    )
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attendable(call.key_mask), scale=call.scale
    )
    return zero_padding(out, call.query_mask)


def _forward(
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
) -> tuple[Tensor, None]:
    call = read_call(module, query, key, value, attention_mask, scaling, is_causal, sliding_window, others)
    out = _current.get()(call)
    if (kernel := convolution_kernel(module)) is not None:
        out = zero_padding(out + skip_convolution(zero_padding(call.value, call.key_mask), kernel), call.query_mask)
    return out.transpose(1, 2).contiguous(), None
