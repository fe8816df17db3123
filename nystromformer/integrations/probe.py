"""Look at what a model's attention is given, run it with another, and measure what that changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from nystromformer.integrations.hf.attention_interface import (
    AttentionCall,
    attention_of,
    exact_attention,
    read_call,
    with_convolution,
)
from nystromformer.integrations.hf.guarded_models import refuse
from nystromformer.integrations.hf.masks import padding_mask
from nystromformer.integrations.hf.modules import interface_modules
from nystromformer.integrations.hf.skip_convolution import convolution_kernel
from nystromformer.integrations.offered import Choice, attention_map, chosen
from nystromformer.models.encoder import NystromformerSelfAttention
from nystromformer.models.model import NystromformerPreTrainedModel

NAME = "nystromformer-substitute"

Attend = Callable[[AttentionCall], Tensor]

_current: ContextVar[Attend] = ContextVar("attention that stands in for a model's own")


@contextmanager
def swap_attention(model: PreTrainedModel, attend: Attend) -> Iterator[None]:
    """Inside, `model` uses `attend`, which turns an `AttentionCall` into (b, h, n, e).

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8))
    >>> with swap_attention(model, lambda call: torch.zeros_like(call.query)):
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


def record_calls(model: PreTrainedModel, **inputs: Tensor) -> tuple[list[AttentionCall], object]:
    """All calls of its attention in one forward of `model` with exact attention, and the model's output."""
    calls: list[AttentionCall] = []

    def attend(call: AttentionCall) -> Tensor:
        calls.append(call)
        return exact_attention(call)

    with swap_attention(model, attend), torch.no_grad():
        output = model(**inputs)
    if not calls:
        refuse(model)
    return calls, output


def _forward(module: nn.Module, *inputs: Any, **others: Any) -> tuple[Tensor, None]:
    call = read_call(module, *inputs, **others)
    out = with_convolution(_current.get()(call), call.value, convolution_kernel(module), call.query_mask)
    return out.transpose(1, 2).contiguous(), None


def own_calls(model: NystromformerPreTrainedModel, **inputs: Tensor) -> list[AttentionCall]:
    """The calls of all layers in one forward of `model`, with the attention that it has.

    >>> from nystromformer.models import NystromformerConfig, NystromformerModel
    >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 8}
    >>> calls = own_calls(NystromformerModel(NystromformerConfig(**sizes)), input_ids=torch.tensor([[5, 6, 7]]))
    >>> [tuple(call.key.shape) for call in calls]
    [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)]
    """
    calls: list[AttentionCall] = []

    def keep(module: nn.Module, given: tuple[Tensor, Tensor, Tensor, Tensor | None]) -> None:
        query, key, value, mask = given
        calls.append(AttentionCall(module, query, key, value, mask, mask, radius=None, scale=None))

    layers = [module for module in model.modules() if isinstance(module, NystromformerSelfAttention)]
    hooks = [layer.attention.register_forward_pre_hook(keep) for layer in layers]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@dataclass(frozen=True)
class HeadErrors:
    """Relative errors of one layer, for each example and head, (b, h)."""

    matrix: Tensor
    """‖Ŝ − S‖ / ‖S‖ of the attention matrices, in the Frobenius norm."""
    output: Tensor
    """‖Ŝ V − S V‖ / ‖S V‖ of what attention gives."""


def head_errors(call: AttentionCall, name: str, **options: Any) -> HeadErrors:
    """Errors of an attention, such as `nystrom-16`, for a recorded call. Short input is approximated too.

    >>> x = torch.randn(1, 2, 50, 8)
    >>> call = AttentionCall(None, x, x, x, query_mask=None, key_mask=None, radius=None, scale=None)
    >>> bool(head_errors(call, "nystrom-50").matrix.max() < 1e-5)  # as many landmarks as tokens
    True
    """
    attend = attention_of(call, approximation(name, options))
    return HeadErrors(
        matrix=relative_error(attention_map(attend, call.query, call.key), exact_map(call)),
        output=relative_error(attend(call.query, call.key, call.value), exact_attention(call)),
    )


def exact_map(call: AttentionCall) -> Tensor:
    """The attention matrix (b, h, n, s) itself."""
    return attention_map(lambda query, key, value: exact_attention(replace(call, value=value)), call.query, call.key)


def approximate_map(call: AttentionCall, name: str, **options: Any) -> Tensor:
    """The matrix (b, h, n, s) that an attention multiplies values with; entries can be slightly negative."""
    return attention_map(attention_of(call, approximation(name, options)), call.query, call.key)


def approximation(name: str, options: dict[str, Any]) -> Choice:
    """An attention that is looked at for what it approximates: few tokens, too, unless `options` say otherwise."""
    return chosen(name, {"exact_below": None, **options})


def relative_error(approximation: Tensor, exact: Tensor) -> Tensor:
    """‖approximation − exact‖ / ‖exact‖ over the last two dimensions; masked rows are 0 in both."""
    norms = [torch.linalg.matrix_norm(x.float()) for x in (approximation.float() - exact.float(), exact)]
    return norms[0] / norms[1].clamp(min=torch.finfo(torch.float32).tiny)
