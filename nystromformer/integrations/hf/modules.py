"""Which modules of a model call which attention function, read from their code, and as what."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from torch import nn

REGISTRY = "ALL_ATTENTION_FUNCTIONS"
"""The table that modules of Transformers look their attention function up in."""

OTHER_SOURCES = {
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
    "context",
    "context_hidden_states",
    "key",
    "keys",
}
"""Parameters of `forward` through which a module can attend to something else than its input."""


def interface_modules(model: nn.Module) -> Iterator[Any]:
    """The modules of `model` that call the registered attention function, in order.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=3, intermediate_size=8)
    >>> [type(module).__name__ for module in interface_modules(BertModel(config))]
    ['BertSelfAttention', 'BertSelfAttention', 'BertSelfAttention']
    """
    return (module for module in model.modules() if calls_interface(type(module)))


def _calls_interface(module_class: type) -> bool:
    """Whether `forward` of a class of modules looks its attention up. Read from the code itself, so that decorated and
    inherited methods count, and other classes of the same file do not."""
    for base in module_class.__mro__:
        if "forward" in vars(base):
            code = getattr(inspect.unwrap(vars(base)["forward"]), "__code__", None)
            names = set(_names(code)) if code else set()
            if REGISTRY in names:
                return True
            if not {"super", "forward"} <= names:
                return False
    return False


calls_interface: Callable[[type], bool] = cache(_calls_interface)


def _calls_function(module_class: Any, function: str) -> bool:
    """Whether `forward` of a class of modules calls a function of this name, itself or through its own methods and the
    functions of its file, torch's own aside.

    >>> calls_function(nn.Linear, "linear"), calls_function(nn.Linear, "scaled_dot_product_attention")
    (True, False)
    """
    waiting, seen = [module_class.forward], set()
    while waiting:
        current = inspect.unwrap(waiting.pop())
        if not isinstance(current, FunctionType) or current in seen:
            continue
        seen.add(current)
        names = set(_names(current.__code__))
        if function in names:
            return True
        for name in names:
            for called in (getattr(module_class, name, None), current.__globals__.get(name)):
                if isinstance(called, FunctionType) and not called.__module__.startswith(("torch.", "nystromformer.")):
                    waiting.append(called)
    return False


calls_function: Callable[[type, str], bool] = cache(_calls_function)


def own_attention_classes(model: nn.Module) -> list[str]:
    """Classes of modules that are called attention but neither call the interface nor belong to one that does."""
    found: dict[str, None] = {}

    def visit(module: nn.Module) -> None:
        if calls_interface(type(module)):
            return
        if "Attention" in type(module).__name__ and next(interface_modules(module), None) is None:
            found[type(module).__name__] = None
        else:
            for child in module.children():
                visit(child)

    visit(model)
    return list(found)


def has_attention(model: nn.Module) -> bool:
    """Whether anything in a model is attention, by its name or by what it calls. FNet, for one, has none."""
    called = any("attention" in type(module).__name__.lower() for module in model.modules())
    return called or next(interface_modules(model), None) is not None


def is_causal_module(module: nn.Module) -> bool | None:
    """Whether an attention module is causal; None where it does not say. What users set in the configuration, as for
    decoders that they use as encoders, goes before what a class says of itself."""
    said = getattr(module.config, "is_causal", None)
    return getattr(module, "is_causal", None) if said is None else said


def is_cross_attention(module: nn.Module, other_source: object) -> bool:
    """Whether a module attends to something else than its own input. `other_source` is what came in beside it."""
    if "cross" in type(module).__name__.lower() or getattr(module, "is_cross_attention", False):
        return True
    return other_source is not None and takes_other_source(type(module))


def is_surely_self_attention(module: nn.Module) -> bool:
    """Whether a module's queries and keys surely come from the same tokens, so that they have one mask.

    Some classes serve both uses and the attention function is not told which. Encoder layers of BART and its like say
    `is_decoder=False`.
    """
    if type(module).__name__.endswith("SelfAttention") or getattr(module, "is_decoder", None) is False:
        return True
    return not takes_other_source(type(module))


def takes_other_source(module_class: Any) -> bool:
    return not OTHER_SOURCES.isdisjoint(inspect.signature(module_class.forward).parameters)


def number_of_heads(module: nn.Module) -> int:
    """How many query heads an attention module has, under the names that Transformers' models use."""
    for place in (module, module.config):
        for name in ("num_attention_heads", "num_heads", "n_heads"):
            heads = getattr(place, name, None)
            if isinstance(heads, int) and not isinstance(heads, bool):
                return heads
    raise ValueError(f"{type(module).__name__} does not say how many heads it has: num_heads or num_attention_heads.")


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
