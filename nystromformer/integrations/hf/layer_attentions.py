"""`config.attention_layers`: another attention in each layer of a model of Transformers, saved and loaded with it.

The list has one name for each self-attention of the model, in order: `standard` is exact, others are as in
`attn_implementation=`, with the number of landmarks if it is to differ from the configuration's. The model's
`attn_implementation` is one of ours, so that its masks are made for them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from nystromformer.attention.registry import parse_attention_name
from nystromformer.attention.standard import StandardAttention
from nystromformer.integrations.hf.modules import interface_modules, is_causal_module, is_cross_attention
from nystromformer.integrations.offered import OFFERED, OPTIONS, Choice, chosen

FIELD = "attention_layers"

ASSIGNED = "_assigned_attention"
"""Where a module keeps the name of its attention."""

EXACT = StandardAttention.name


def assign_layers(model: nn.Module) -> None:
    """Tell each self-attention of `model` which attention its configuration lists for it.

    A part of a model that has fewer of them is left for the whole, which is built after its parts.
    """
    by_config: dict[int, list[Any]] = {}
    for module in interface_modules(model):
        vars(module).pop(ASSIGNED, None)
        if is_listed(module):
            by_config.setdefault(id(module.config), []).append(module)
    for modules in by_config.values():
        names = listed(modules[0].config)
        if names is not None and len(names) == len(modules):
            for module, name in zip(modules, names, strict=True):
                vars(module)[ASSIGNED] = name


def is_listed(module: nn.Module) -> bool:
    """Whether an attention module has a place in the list: self-attention that is not causal."""
    return not is_cross_attention(module, None) and not is_causal_module(module)


def assigned_attention(module: Any) -> str | None:
    """The name that the configuration lists for a module; None where it lists none."""
    names = listed(module.config)
    if names is None or not is_listed(module):
        return None
    if ASSIGNED not in vars(module):
        raise ValueError(
            f"{type(module).__name__}: config.{FIELD} lists {len(names)} attentions, which is not as many as the model "
            f"has; set one for each, or remove the field, before the model is made."
        )
    return vars(module)[ASSIGNED]


def is_exact_layer(module: Any) -> bool:
    """Whether the configuration keeps a module's exact attention, or can't tell of it before the model is whole."""
    return listed(module.config) is not None and vars(module).get(ASSIGNED, EXACT) == EXACT


def listed(config: Any) -> Sequence[str] | None:
    names = getattr(config, FIELD, None)
    if names is not None and (not isinstance(names, (list, tuple)) or not all(isinstance(n, str) for n in names)):
        raise TypeError(f"config.{FIELD}={names!r}: must be a list of names, as ['standard', 'nystrom-local-64'].")
    return names


def layer_choice(name: str, options: Mapping[str, Any]) -> Choice | None:
    """The attention of a listed name with those of the configuration's options that it has; None for exact.

    >>> layer_choice("nystrom-32", {"block_size": 16, "num_landmarks": 64, "exact_below": None})
    Choice(name='nystrom', options={'num_landmarks': 32, 'exact_below': None})
    >>> layer_choice("standard", {}) is None
    True
    """
    attention, sized = parse_attention_name(name)
    if attention.name == EXACT:
        return None
    known = OPTIONS.get(attention.name, {})
    return Choice(attention.name, {key: value for key, value in options.items() if key in known} | sized)


def check_layers(names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Refuse names that are not offered, and options that none of their attentions has or takes."""
    choices = [(name, layer_choice(name, options)) for name in names]
    used = [(name, choice) for name, choice in choices if choice is not None]
    for name, choice in used:
        if choice.name not in OFFERED:
            raise ValueError(f"config.{FIELD} has {name!r}: must be {EXACT!r}, {', '.join(map(repr, OFFERED))}.")
        chosen(choice.name, choice.options)
    unknown = [option for option in options if not any(option in OPTIONS[choice.name] for _, choice in used)]
    if unknown and used:
        raise ValueError(f"option {unknown[0]!r}: none of {', '.join(name for name, _ in used)} has it; remove it.")


def set_layers(model: PreTrainedModel, names: Sequence[str], options: Mapping[str, Any]) -> PreTrainedModel:
    """Give each self-attention of `model` the attention of its place in `names`; returns the model.

    Configuration and saved files say so. `nystromformer.register()` must have been called.

    >>> import nystromformer
    >>> from transformers import BertConfig, BertModel
    >>> nystromformer.register()
    >>> config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=2, intermediate_size=8)
    >>> model = set_layers(BertModel(config), ["standard", "nystrom-local-16"], {})
    >>> model.config.attention_layers, model.config._attn_implementation
    (['standard', 'nystrom-local-16'], 'nystrom-local')
    """
    modules = [module for module in interface_modules(model) if is_listed(module)]
    if len(modules) != len(names):
        raise ValueError(f"{len(names)} attentions for {len(modules)} layers of {type(model).__name__}: give one each.")
    check_layers(names, options)
    linear = [choice.name for name in names if (choice := layer_choice(name, options)) is not None]
    if not linear:
        raise ValueError(f"attentions {', '.join(names)}: at least one layer must have another than {EXACT}.")
    model.config.attention_layers, model.config.attention_options = list(names), dict(options)
    model.set_attn_implementation(linear[0])
    return model
