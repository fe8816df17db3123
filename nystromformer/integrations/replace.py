"""`replace_attention`: attention of linear cost in any module of PyTorch, or in a part of one.

Three kinds of attention are found: modules of Transformers' attention interface, `nn.MultiheadAttention`, and modules
whose `forward` calls `functional.scaled_dot_product_attention`. Each keeps its parameters, and so its state dict. The
first kind gets a view of its configuration that names our attention; what it shares with others stays as it was. The
other two get a class of the same name whose `forward` redirects those calls.
"""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nystromformer.attention import Attention
from nystromformer.checks import did_you_mean
from nystromformer.integrations.hf.adapters import remember_in_adapters
from nystromformer.integrations.hf.modules import (
    calls_function,
    calls_interface,
    has_attention,
    interface_modules,
    is_causal_module,
    is_cross_attention,
    takes_other_source,
)
from nystromformer.integrations.offered import RECORD, Choice, Replacement, chosen, crossing, one_of
from nystromformer.integrations.sdpa import Redirect

NESTED = "use_nested_tensor"
"""By this `nn.TransformerEncoder` decides to hand its layers nested tensors, which only its fast path can read."""

SDPA = "scaled_dot_product_attention"

Layers = Iterable[str | int] | Callable[[str, nn.Module], bool]


def replace_attention(
    module: nn.Module, attention: str = "nystrom-local", layers: Layers | None = None, **options: Any
) -> list[str]:
    """Give the attentions inside `module` another that costs linear time and memory; returns their names.

    `module` can be a whole model or any part of one: the encoder of an encoder–decoder, one layer. Parameters, state
    dicts and saved files stay what they were, so a model that is loaded again is replaced again. `restore_attention`
    undoes it. What linear attention can't do is refused by the module's name when it is asked for: causal calls, masks
    over pairs of tokens, biases on the logits, dropout on attention weights.

    Args:
        module: holds modules of Transformers' attention interface, `nn.MultiheadAttention`, or modules that call
            `functional.scaled_dot_product_attention`.
        attention: a name such as "nystrom", "nystrom-64" or "nystrom-local-128"; "nystrom-local" suits weights that
            were trained with exact attention.
        layers: which of them: names (of an attention or of what holds it) and numbers in order, or a function of name
            and module. All by default.
        options: of the attention, such as `block_size=64`.

    >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), num_layers=2)
    >>> replace_attention(encoder, "nystrom-64", layers=[0])
    ['layers.0.self_attn']
    >>> restore_attention(encoder)
    ['layers.0.self_attn']
    """
    choice = chosen(attention, options)
    found = attentions_of(module)
    names = _selected(found, layers, module)
    for name in names:
        _check_replaceable(name, found[name], choice)
    for name in names:
        _restore(found[name])
        if calls_interface(type(found[name])):
            vars(found[name])[RECORD] = Replacement(name, choice)
        else:
            _redirect(found[name], name, choice)
    replaced = {found[name] for name in names}
    _view_configs(module, {part for part in replaced if calls_interface(type(part))}, choice)
    _leave_nested_tensors(module, replaced)
    remember_in_adapters()
    return names


def restore_attention(module: nn.Module) -> list[str]:
    """Undo `replace_attention` in `module` and its parts; returns the names of the attentions that were replaced."""
    records = {name: _restore(part) for name, part in module.named_modules()}
    return [name for name, record in records.items() if record is not None and record.choice is not None]


def attentions_of(module: nn.Module) -> dict[str, nn.Module]:
    """The attentions in `module` that can be replaced, by name and in order."""
    return {
        name: part
        for name, part in module.named_modules()
        if not isinstance(part, Attention)
        and (calls_interface(type(part)) or isinstance(part, nn.MultiheadAttention) or calls_function(type(part), SDPA))
    }


def _selected(found: dict[str, nn.Module], layers: Layers | None, module: nn.Module) -> list[str]:
    if not found:
        other = "" if has_attention(module) else " Nothing in it is called attention: it may mix tokens in another way."
        raise ValueError(
            f"{type(module).__name__} has no attention to replace.{other} Looked for modules that call Transformers' "
            f"attention interface (ALL_ATTENTION_FUNCTIONS), nn.MultiheadAttention, and modules whose forward calls "
            f"functional.{SDPA}. Attention that is written out as a softmax can't be found: make it call "
            f"{SDPA}. Our own models take config.attention."
        )
    if layers is None:
        return list(found)
    if callable(layers):
        names = [name for name, part in found.items() if layers(name, part)]
    elif isinstance(layers, (str, int)):
        raise TypeError(f"layers={layers!r}: must be a list of names and numbers, as [{layers!r}], or a function.")
    else:
        wanted = [name for layer in layers for name in _named(found, layer)]
        names = [name for name in found if name in wanted]
    if not names:
        raise ValueError(f"layers={layers!r} chooses none of the attentions {', '.join(found)}.")
    return names


def _named(found: dict[str, nn.Module], layer: str | int) -> list[str]:
    if isinstance(layer, int) and not isinstance(layer, bool):
        if not -len(found) <= layer < len(found):
            raise ValueError(f"layers has {layer}: must lie between {-len(found)} and {len(found) - 1}.")
        return [list(found)[layer]]
    names = [name for name in found if name == layer or name.startswith(f"{layer}.")]
    if not names:
        raise ValueError(
            f"layers has {layer!r}, which is or holds no attention that can be replaced: there are "
            f"{', '.join(found)}.{did_you_mean(str(layer), found)}"
        )
    return names


def _check_replaceable(name: str, part: nn.Module, choice: Choice) -> None:
    """Refuse now what would surely be refused in every call."""
    if not calls_interface(type(part)):
        return
    where = f"{name or 'the module'} ({type(part).__name__})"
    if is_causal_module(part):
        raise ValueError(
            f"{where} is causal, and landmarks average over later tokens: leave it out with layers=…, or call "
            f"replace_attention with the encoder alone, as model.get_encoder()."
        )
    if is_cross_attention(part, None) and not choice.attention.cross_attention:
        raise ValueError(
            f"{where} is cross-attention, and {choice.name} is for self-attention: leave it out with layers=…, or use "
            f"{one_of(crossing())}."
        )


def _redirect(part: nn.Module, name: str, choice: Choice) -> None:
    record = Replacement(name, choice, before={"__class__": type(part)})
    if isinstance(part, nn.MultiheadAttention):
        # With a hook inside it, nn.TransformerEncoderLayer leaves its fused fast path, which never calls the module.
        record.hook = part.register_forward_pre_hook(_refuse_nested)
    part.__class__ = _redirected_class(type(part))
    vars(part)[RECORD] = record


def _make_redirected_class(base: type[nn.Module]) -> type[nn.Module]:
    """A class like `base` whose `forward` has its calls of exact attention redirected."""
    self_attention = not takes_other_source(base)

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> object:
        record = vars(self)[RECORD]
        where = f"{record.name or 'the module'} ({base.__name__})"
        redirect = Redirect(record.choice, where, self_attention)
        with redirect:
            out = base.forward(self, *args, **kwargs)
        if not torch.compiler.is_compiling() and not redirect.calls:
            raise ValueError(
                f"{where} was given {record.choice.name} attention, but its forward never called {SDPA}: switch it to "
                f"fused attention, or leave it out with layers=…."
            )
        return out

    def reduce(self: nn.Module, protocol: int) -> tuple:
        return _remade, (base,), self.__getstate__()

    kept = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**kept, "forward": forward, "__reduce_ex__": reduce})


_redirected_class: Callable[[type], Any] = functools.cache(_make_redirected_class)


def _remade(base: type[nn.Module]) -> nn.Module:
    """For copies and pickles: their state comes after."""
    return base.__new__(_redirected_class(base))


def _refuse_nested(part: nn.Module, inputs: tuple) -> None:
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].is_nested:
        raise ValueError(
            f"{vars(part)[RECORD].name or 'the module'} ({type(part).__name__}) was given a nested tensor: call "
            f"replace_attention with the whole nn.TransformerEncoder, or set its {NESTED} to False."
        )


def _view_configs(module: nn.Module, replaced: set[nn.Module], choice: Choice) -> None:
    """Let configurations name our attention: that of each replaced module of Transformers, and those of the models that
    hold none but replaced ones, since masks are made there. The original, which others may share, is left alone."""
    if not replaced:
        return
    from nystromformer.integrations.hf.attention_interface import register_attention

    register_attention()
    models = {
        part
        for part in module.modules()
        if hasattr(part, "set_attn_implementation") and (inside := set(interface_modules(part))) and inside <= replaced
    }
    views: dict[int, Any] = {}
    for part in replaced | models:
        original: Any = part.config
        if id(original) not in views:
            views[id(original)] = view = copy.copy(original)
            view._attn_implementation_internal = choice.name
        record = vars(part).setdefault(RECORD, Replacement(""))
        record.before.setdefault("config", original)
        record.holders = [model for model in models if part in replaced and part in set(model.modules())]
        part.config = views[id(original)]


def _leave_nested_tensors(module: nn.Module, replaced: set[nn.Module]) -> None:
    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder) and not replaced.isdisjoint(part.modules()):
            record = vars(part).setdefault(RECORD, Replacement(""))
            record.before.setdefault(NESTED, part.use_nested_tensor)
            part.use_nested_tensor = False


def _restore(part: nn.Module) -> Replacement | None:
    record = vars(part).pop(RECORD, None)
    if record is None:
        return None
    for attribute, value in record.before.items():
        setattr(part, attribute, value)
    if record.hook is not None:
        record.hook.remove()
    for holder in record.holders:
        _restore(holder)
    return record
