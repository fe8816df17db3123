"""Adapters of PEFT remember the attention that they were trained with: it is no part of what PEFT saves.

The configuration of a saved adapter names it in a field of its own. When the adapter is loaded into a model with other
attention, a warning says so. PEFT without this package warns of the field, which it does not know, by its name.
"""

import functools
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from nystromformer.integrations.hf.modules import interface_modules
from nystromformer.integrations.offered import Choice, replacement_of

FIELD = "trained_with_attention"
"""In adapter_config.json: the attentions, each with its name, its options and the number of modules that have it."""

EXTENDED = "_nystromformer_adapters"


def remember_in_adapters() -> None:
    """Extend PEFT, if it is imported. A second call changes nothing."""
    model: Any = getattr(sys.modules.get("peft"), "PeftModel", None)
    if model is None or hasattr(model, EXTENDED):  # not there, or in the middle of its import
        return
    configuration: Any = sys.modules["peft.config"].PeftConfigMixin
    setattr(model, EXTENDED, True)
    _extend(model, "save_pretrained", _save)
    _extend(model, "load_adapter", _load)
    _extend(configuration, "to_dict", _to_dict)
    read = configuration.from_peft_type.__func__  # of a class method

    @functools.wraps(read)
    def from_peft_type(cls: type, **fields: Any) -> object:
        attentions = fields.pop(FIELD, None)
        config = read(cls, **fields)
        if attentions is not None:
            vars(config)[FIELD] = attentions
        return config

    configuration.from_peft_type = classmethod(from_peft_type)


def attentions_in(model: nn.Module) -> list[dict[str, Any]]:
    """The attentions of ours that a model was given, with their options and the number of modules that have them."""
    from nystromformer.integrations.hf.attention_interface import FUNCTIONS, configured_choice

    counts: dict[str, int] = {}
    called = set(interface_modules(model))
    module: Any
    for module in model.modules():
        replacement, choice = replacement_of(module), None
        if replacement is not None and replacement.choice is not None:
            choice = replacement.choice
        elif module in called and (name := module.config._attn_implementation) in FUNCTIONS:
            choice = configured_choice(module, name)
        if choice is not None:
            key = _written(choice)
            counts[key] = counts.get(key, 0) + 1
    return [{**json.loads(key), "modules": count} for key, count in counts.items()]


def _written(choice: Choice) -> str:
    return json.dumps({"name": choice.name, "options": dict(choice.options)}, sort_keys=True, default=str)


def _extend(owner: Any, name: str, extension: Callable) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> object:
        return extension(self, functools.partial(original, self), *args, **kwargs)

    setattr(owner, name, method)


def _save(model: Any, original: Callable, *args: Any, **kwargs: Any) -> None:
    note_attentions(model)
    original(*args, **kwargs)


def _load(model: Any, original: Callable, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> object:
    result = original(model_id, adapter_name, *args, **kwargs)
    warn_of_other_attention(model, adapter_name)
    return result


def note_attentions(model: Any) -> None:
    """Let the configurations of a model's adapters name its attentions."""
    configs = getattr(model, "peft_config", None) or {}
    attentions = attentions_in(model) if configs else []
    for config in configs.values():
        vars(config).pop(FIELD, None)
        if attentions:
            vars(config)[FIELD] = attentions


def warn_of_other_attention(model: Any, adapter_name: str) -> None:
    """Say that a model has other attention than the one that an adapter of it was trained with."""
    trained, has = vars(model.peft_config[adapter_name]).get(FIELD), attentions_in(model)
    if trained is not None and trained != has:
        warnings.warn(
            f"Adapter {adapter_name!r} was trained with {_told(trained)}; this model has {_told(has)}, so that it "
            f"computes something else. Give the model the same: set config.attention_options, then call "
            f"set_attn_implementation(…), or call nystromformer.replace_attention.",
            stacklevel=5,
        )


def _to_dict(config: Any, original: Callable) -> dict[str, Any]:
    attentions = vars(config).get(FIELD)
    return original() if attentions is None else {**original(), FIELD: attentions}


def _told(attentions: Any) -> str:
    if not attentions:
        return "exact attention"
    try:
        return " and ".join(_told_one(each["modules"], each["name"], each["options"]) for each in attentions)
    except (AttributeError, KeyError, TypeError):  # a file that others wrote
        return f"{FIELD} {str(attentions)[:200]!r}"


def _told_one(modules: int, name: str, options: dict[str, Any]) -> str:
    given = ", ".join(f"{option}={value!r}" for option, value in options.items())
    return f"attention {name!r} in {modules} of its modules" + (f" ({given})" if given else "")
