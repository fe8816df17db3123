"""Models that would accept our names and not use them are refused; what a saved model was is remembered and rebuilt.

Transformers checks that a name is registered, not that a model will ever look it up: some have attention of their own
and would run it, dense, under our name. It also forgets the name when a model is saved. So five methods of
`PreTrainedModel` are extended here, once per process, and do what they did for all other names.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nystromformer.integrations.hf.adapters import note_attentions, remember_in_adapters, warn_of_other_attention
from nystromformer.integrations.hf.attention_interface import CALLED, FUNCTIONS, check_configuration
from nystromformer.integrations.hf.layer_attentions import assign_layers
from nystromformer.integrations.hf.masks import REMEDY
from nystromformer.integrations.hf.modules import has_attention, interface_modules, own_attention_classes
from nystromformer.integrations.hf.skip_convolution import AddedSkipConvolution, attach_recorded
from nystromformer.models.flattened import restarts

WATCH = "_nystromformer_watch"

TOLD = "_nystromformer_borders"

REMEMBERED = "attn_implementation"
"""Transformers reads this field of a configuration file by itself, and refuses names that are not registered."""


def guard_models() -> None:
    """Extend the methods. A second call changes nothing."""
    for name, extension in EXTENSIONS.items():
        original = getattr(PreTrainedModel, name)
        if not hasattr(original, WATCH):
            setattr(PreTrainedModel, name, _extended(original, extension))


def _extended(original: Callable, extension: Callable) -> Callable:
    @functools.wraps(original)
    def method(model: PreTrainedModel, *args: Any, **kwargs: Any) -> object:
        return extension(model, functools.partial(original, model), *args, **kwargs)

    setattr(method, WATCH, True)
    return method


def finish_building(model: PreTrainedModel, original: Callable) -> None:
    """`post_init`: all modules are there, no weights are loaded yet."""
    if model.config._attn_implementation in FUNCTIONS:
        check_model(model)
        assign_layers(model)
        attach_recorded(model)
        watch(model)
        tell_borders(model)
    remember(model.config)
    original()


def set_implementation(
    model: PreTrainedModel, original: Callable, attn_implementation: str | dict, *args: Any, **kwargs: Any
) -> None:
    """`set_attn_implementation`: where a model can't change its attention, Transformers warns and leaves it."""
    before = model.config._attn_implementation
    original(attn_implementation, *args, **kwargs)
    remember(model.config)
    if FUNCTIONS.keys().isdisjoint(_names(attn_implementation)):
        if any(isinstance(module, AddedSkipConvolution) for module in model.modules()):
            warnings.warn("The added skip convolutions are not used by this attention.", stacklevel=3)
        return
    try:
        if not any(module.config._attn_implementation in FUNCTIONS for module in interface_modules(model)):
            refuse(model)
        check_model(model)
        assign_layers(model)
    except (TypeError, ValueError):
        model.config._attn_implementation = before
        remember(model.config)
        raise
    watch(model)
    tell_borders(model)


def initialize(model: PreTrainedModel, original: Callable, module: nn.Module, *args: Any) -> None:
    """`_initialize_weights`: models know how their own modules start, and would leave ours as uninitialized memory."""
    if isinstance(module, AddedSkipConvolution):
        module.reset_parameters()
    original(module, *args)


def save(model: PreTrainedModel, original: Callable, *args: Any, **kwargs: Any) -> None:
    """`save_pretrained`: of a model with adapters it saves these alone."""
    note_attentions(model)
    original(*args, **kwargs)


def load_adapter(model: PreTrainedModel, original: Callable, *args: Any, **kwargs: Any) -> object:
    """`load_adapter`: Transformers' own way to load one of PEFT."""
    remember_in_adapters()
    before = set(getattr(model, "peft_config", None) or {})
    result = original(*args, **kwargs)
    for name in set(model.peft_config) - before:
        warn_of_other_attention(model, name)
    return result


EXTENSIONS: dict[str, Callable[..., Any]] = {
    "post_init": finish_building,
    "set_attn_implementation": set_implementation,
    "_initialize_weights": initialize,
    "save_pretrained": save,
    "load_adapter": load_adapter,
}


def check_model(model: PreTrainedModel) -> None:
    """Refuse a model whose attention never calls the interface; say so where that is true of a part of it."""
    own = own_attention_classes(model)
    if own and next(interface_modules(model), None) is None:
        refuse(model)
    if own:
        warnings.warn(f"{', '.join(own)}: these modules keep their own attention, which is exact.", stacklevel=2)
    for module in interface_modules(model):
        if (name := module.config._attn_implementation) in FUNCTIONS:
            check_configuration(module.config, name)


def remember(config: PreTrainedConfig) -> None:
    """Let a configuration say which of our attentions its model has, so that it is saved with it.

    A saved model then comes back with its attention after `register()`, and is refused by name without it: exact
    attention under the same weights would be another model.
    """
    name = ours_in(config)
    if name:
        setattr(config, REMEMBERED, name)
    elif REMEMBERED in vars(config):
        delattr(config, REMEMBERED)


def ours_in(config: PreTrainedConfig) -> str | dict | None:
    """Our attentions in a configuration as `attn_implementation=` takes them: a name, or one for each part of it."""
    own = config._attn_implementation if config._attn_implementation in FUNCTIONS else None
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    names = {key: ours_in(part) for key, part in parts.items() if part is not None}
    if all(name == own for name in names.values()):
        return own
    return {key: name for key, name in {"": own, **names}.items() if name}


def refuse(model: PreTrainedModel) -> None:
    """Say why the attention of a model can't be replaced."""
    name, asked = type(model).__name__, model.config._attn_implementation
    if not has_attention(model):
        raise ValueError(
            f"{name} has no attention to replace: it mixes tokens in another way. Leave it as it is, or give an "
            f"encoder that has attention, such as BERT."
        )
    effect = (
        f", so attn_implementation={asked!r} would change nothing: {REMEDY}"
        if asked in FUNCTIONS
        else (": its attention is code of its own, which can't be replaced; give another model")
    )
    raise ValueError(
        f"{name} never calls Transformers' attention interface{effect}. Models that have it say "
        f"`ALL_ATTENTION_FUNCTIONS` in their code: BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT, ViT and many more."
    )


def watch(model: PreTrainedModel) -> None:
    """After the first forward of `model`, see that our function was called at all."""
    unwatch(model)
    handles = [model.register_forward_pre_hook(_leave_parts_to_the_whole), model.register_forward_hook(_check_called)]
    vars(model)[WATCH] = handles


def unwatch(model: nn.Module) -> None:
    for handle in vars(model).pop(WATCH, []):
        handle.remove()


def _leave_parts_to_the_whole(model: PreTrainedModel, args: object) -> None:
    # a part may rightly have no attention, such as the convolutional backbone of a detector
    if not torch.compiler.is_compiling():
        for part in model.modules():
            if part is not model:
                unwatch(part)


def _check_called(model: PreTrainedModel, args: object, output: object) -> None:
    if torch.compiler.is_compiling():
        return
    unwatch(model)
    if model.config._attn_implementation in FUNCTIONS and not any(module in CALLED for module in model.modules()):
        refuse(model)


def tell_borders(model: PreTrainedModel) -> None:
    """Let attention know the sequences of a flattened batch, from now on. Where `position_ids` begin anew is all that a
    collator may say of them, and most encoders keep that to their embeddings."""
    if TOLD not in vars(model):
        vars(model)[TOLD] = model.register_forward_pre_hook(_add_borders, with_kwargs=True)


def _add_borders(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    positions = kwargs.get("position_ids")
    told = any(kwargs.get(name) is not None for name in ("attention_mask", "cu_seq_lens_q", "cu_seq_lens_k"))
    if told or torch.compiler.is_compiling() or model.config._attn_implementation not in FUNCTIONS:
        return None
    borders = restarts(positions) if isinstance(positions, torch.Tensor) and positions.dim() == 2 else None
    if borders is None:
        return None
    return args, {**kwargs, "cu_seq_lens_q": borders, "cu_seq_lens_k": borders}


def _names(attn_implementation: str | dict | None) -> Iterator[str]:
    if isinstance(attn_implementation, dict):
        for value in attn_implementation.values():
            yield from _names(value)
    elif attn_implementation is not None:
        yield attn_implementation
