"""Which attention each layer gets: what every candidate costs there, in error and in time, and a budget for one."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nystromformer.attention.registry import parse_attention_name
from nystromformer.checks import parse_whole_numbers
from nystromformer.integrations.attention_interface import AttentionCall, attention_of
from nystromformer.integrations.layer_attentions import EXACT, layer_choice
from nystromformer.integrations.offered import OFFERED
from nystromformer.integrations.probe import record_calls, relative_error

REPEATS = 3
"""Timings of each attention, of which the least counts."""


@dataclass(frozen=True)
class Budget:
    """`error=0.1`: no layer has a larger error before training. `speed=2`: attention is at least twice as fast."""

    kind: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """
        >>> Budget.parse("error=0.1")
        Budget(kind='error', value=0.1)
        >>> Budget.parse("0.1")
        Traceback (most recent call last):
        ValueError: --budget 0.1: must be error=NUMBER (of a layer, as 0.1) or speed=NUMBER (times exact, as 2).
        """
        kind, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if kind not in ("error", "speed") or not 0 < value < 1e6:
            raise ValueError(
                f"--budget {text}: must be error=NUMBER (of a layer, as 0.1) or speed=NUMBER (times exact, as 2)."
            )
        return cls(kind, value)


@dataclass(frozen=True)
class Candidate:
    """One attention in one layer."""

    name: str
    error: float
    """‖ours − exact‖ / ‖exact‖ of its output, mean over examples and heads, untrained."""
    seconds: float
    """Of a call."""


Sensitivity = list[dict[str, Candidate]]
"""For each layer, the candidates by name."""


def candidate_names(attention: str) -> list[str]:
    """Exact attention, the one that was asked for, and the other offered ones of its size.

    >>> candidate_names("nystrom-32")
    ['standard', 'nystrom-32', 'nystrom-local-32']
    """
    own, sized = parse_attention_name(attention)
    size = "".join(f"-{number}" for number in sized.values())
    return [EXACT, attention, *(f"{name}{size}" for name in OFFERED if name != own.name)]


@torch.no_grad()
def measure_sensitivity(
    teacher: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    names: Sequence[str],
    options: dict[str, Any],
    step: Callable[[str], None] = lambda label: None,
) -> Sensitivity:
    """Error and time of each attention in each layer of `teacher`, each given what the exact model gives it."""
    errors: list[dict[str, list[float]]] = []
    seconds: list[dict[str, list[float]]] = []
    for number, batch in enumerate(batches):
        step(f"sensitivity of layers: {number + 1} of {len(batches)}")
        calls, _ = record_calls(teacher, **batch)
        if not errors:
            errors = [{name: [] for name in names} for _ in calls]
            seconds = [{name: [] for name in names} for _ in calls]
        for layer, each in enumerate(calls):
            exact = _attend(each, EXACT, options)
            for name in names:
                error = 0.0 if name == EXACT else relative_error(_attend(each, name, options), exact).mean().item()
                errors[layer][name].append(error)
            for _ in range(REPEATS):  # interleaved, so that others on the machine disturb all alike
                for name in names:
                    seconds[layer][name].append(_timed(each, name, options))
    return [
        {name: Candidate(name, statistics.mean(errors[layer][name]), min(seconds[layer][name])) for name in names}
        for layer in range(len(errors))
    ]


def choose(sensitivity: Sensitivity, budget: Budget) -> list[str]:
    """For each layer the name of an attention.

    With `error` it is the fastest whose error is within the budget. With `speed` layers change from exact attention,
    always where the least error buys the most time, until the sum of their times is within the budget.

    >>> fast, slow = Candidate("nystrom", 0.3, 1.0), Candidate("standard", 0.0, 4.0)
    >>> layers = [{"standard": slow, "nystrom": fast}, {"standard": slow, "nystrom": Candidate("nystrom", 0.1, 1.0)}]
    >>> choose(layers, Budget("error", 0.2)), choose(layers, Budget("speed", 1.5)), choose(layers, Budget("speed", 4))
    (['standard', 'nystrom'], ['standard', 'nystrom'], ['nystrom', 'nystrom'])
    """
    if budget.kind == "error":
        return [
            min((each for each in layer.values() if each.error <= budget.value), key=lambda each: each.seconds).name
            for layer in sensitivity
        ]
    now = [layer[EXACT] for layer in sensitivity]
    limit = sum(each.seconds for each in now) / budget.value
    while sum(each.seconds for each in now) > limit * (1 + 1e-9):
        changes = [
            ((other.error - now[layer].error) / (now[layer].seconds - other.seconds), layer, other)
            for layer, candidates in enumerate(sensitivity)
            for other in candidates.values()
            if other.seconds < now[layer].seconds
        ]
        if not changes:
            fastest = sum(layer[EXACT].seconds for layer in sensitivity) / sum(each.seconds for each in now)
            raise ValueError(
                f"--budget speed={budget.value:g}: at this length the fastest attention is {fastest:.2f} times as fast "
                f"as exact attention; give at most that, or a larger --max-length."
            )
        _, layer, other = min(changes, key=lambda change: change[:2])
        now[layer] = other
    return [each.name for each in now]


def chosen_layers(text: str, attention: str, count: int) -> list[str]:
    """The attention of each of `count` layers where those of `text`, as 0,2,3, get `attention`; all if it is empty.

    >>> chosen_layers("0,2", "nystrom-64", 3)
    ['nystrom-64', 'standard', 'nystrom-64']
    """
    layers = parse_whole_numbers("--layers", text, 0, count - 1) if text else list(range(count))
    return [attention if layer in layers else EXACT for layer in range(count)]


def _attend(call: AttentionCall, name: str, options: dict[str, Any]) -> Tensor:
    return attention_of(call, layer_choice(name, options))(call.query, call.key, call.value)


def _timed(call: AttentionCall, name: str, options: dict[str, Any]) -> float:
    if call.query.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    _attend(call, name, options)
    if call.query.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started
