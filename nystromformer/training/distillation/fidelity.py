"""How closely another attention follows exact attention, and what it saves: in each layer before training, which with a
budget decides what each layer gets, and in the whole model on held-out texts after it."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from nystromformer.attention.registry import parse_attention_name
from nystromformer.checks import parse_whole_numbers
from nystromformer.data.corpus.windows import Windows
from nystromformer.integrations.hf.attention_interface import AttentionCall, attention_of
from nystromformer.integrations.hf.layer_attentions import EXACT, is_listed, layer_choice
from nystromformer.integrations.hf.modules import interface_modules
from nystromformer.integrations.offered import OFFERED
from nystromformer.integrations.probe import record_calls, relative_error, swap_attention
from nystromformer.progress import steps_bar
from nystromformer.training.distillation.model import Distillation, embedding, hidden_states, token_mask_of

REPEATS = 3
"""Timings of each attention in a layer, of which the least counts."""
TIMINGS = 5
"""Timings of each model, as well."""
NEIGHBORS = 10
HELD_OUT = "held out"
"""The part of a corpus that is not trained on."""


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
    started = _now(call.query.is_cuda)
    _attend(call, name, options)
    return _now(call.query.is_cuda) - started


def judge(
    distillation: Distillation,
    judged: dict[str, Windows],
    options: dict[str, Any],
    layers: tuple[str, ...],
    arguments: TrainingArguments,
) -> dict[str, Any]:
    """How closely the student follows on each part, how the untrained attention does, and how fast it is."""
    teacher: Any = distillation.teacher
    student, pooling = distillation.student, distillation.pooling or "mean"
    choices = dict(zip(filter(is_listed, interface_modules(teacher)), layers, strict=True))

    def untrained(call: AttentionCall) -> Any:
        return _attend(call, choices[call.module], options)

    common = {"batch_size": arguments.eval_batch_size, "device": arguments.device}
    parts = {}
    batches = sum(3 * -(-len(windows) // arguments.eval_batch_size) for windows in judged.values())
    with steps_bar(batches) as step:
        for name, windows in judged.items():
            exact = read_texts(teacher, windows, pooling, step=step, **common)
            before = read_texts(
                teacher, windows, pooling, step=step, inside=partial(swap_attention, teacher, untrained), **common
            )
            ours = read_texts(student, windows, pooling, teacher, step=step, **common)
            parts[name] = {
                **closeness(exact.embeddings, ours.embeddings),
                "examples": len(windows),
                "errors": ours.errors,
                "untrained": closeness(exact.embeddings, before.embeddings),
            }
    longest = judged[HELD_OUT].batch([int(judged[HELD_OUT].lengths.argmax())])
    longest = {name: each.to(arguments.device) for name, each in longest.items()}
    seconds = seconds_of({"exact": teacher, "ours": student}, longest)
    return {"parts": parts, "speed": seconds | {"length": longest["input_ids"].shape[1]}}


@dataclass(frozen=True)
class Reading:
    """What a model makes of some texts."""

    embeddings: Tensor  # (texts, d), each of length 1
    errors: list[float]
    """Of the hidden states after each layer against another model's, ‖ours − theirs‖ / ‖theirs‖, mean over texts."""


@torch.no_grad()
def read_texts(
    model: nn.Module,
    windows: Windows,
    pooling: str,
    other: nn.Module | None = None,
    *,
    batch_size: int,
    device: torch.device,
    inside: Callable[[], AbstractContextManager] = nullcontext,
    step: Callable[[str], None] = lambda label: None,
) -> Reading:
    """`model` on all windows, within `inside()`, compared with `other` layer by layer if that is given."""
    order = windows.lengths.argsort(kind="stable")
    found: list[Tensor] = []
    errors: list[Tensor] = []
    for start in range(0, len(order), batch_size):
        step("held-out texts")
        batch = {name: each.to(device) for name, each in windows.batch(order[start : start + batch_size]).items()}
        mask = token_mask_of(batch)
        with inside():
            states = hidden_states(model, batch)
        found.append(embedding(states[-1], mask, pooling).cpu())
        if other is not None:
            theirs = hidden_states(other, batch)
            errors.append(torch.stack([_errors(one, two, mask) for one, two in zip(states, theirs, strict=True)]).cpu())
    embeddings = torch.empty(len(windows), found[0].shape[1])
    embeddings[torch.from_numpy(order)] = torch.cat(found)
    return Reading(embeddings, torch.cat(errors, dim=1).mean(dim=1).tolist() if errors else [])


def closeness(exact: Tensor, ours: Tensor) -> dict[str, float]:
    """Cosine of embeddings, mean and worst, and how far both models find the same neighbors among the texts.

    >>> exact = torch.eye(3)
    >>> closeness(exact, exact)["cosine"], closeness(exact, exact)["top_1"]
    (1.0, 1.0)
    """
    cosines = (exact * ours).sum(dim=-1)
    neighbors = min(NEIGHBORS, len(exact) - 1)
    found = {"cosine": cosines.mean().item(), "worst": cosines.min().item()}
    if neighbors < 1:
        return found
    first, second = (_neighbors(each, neighbors) for each in (exact, ours))
    shared = (first[:, :, None] == second[:, None, :]).any(dim=2)
    return found | {
        "top_1": (first[:, 0] == second[:, 0]).float().mean().item(),
        "top_10": shared.float().mean().item(),
    }


@torch.no_grad()
def seconds_of(models: dict[str, nn.Module], batch: dict[str, Tensor]) -> dict[str, float]:
    """The time of one forward of each, the least of some that are taken in turns."""
    found: dict[str, list[float]] = {name: [] for name in models}
    cuda = next(iter(batch.values())).is_cuda
    for turn in range(TIMINGS + 1):
        for name, model in models.items():
            started = _now(cuda)
            model(**batch)
            if turn:  # the first warms up
                found[name].append(_now(cuda) - started)
    return {name: min(times) for name, times in found.items()}


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _neighbors(embeddings: Tensor, count: int) -> Tensor:
    """The nearest others of each, nearest first."""
    similar = embeddings @ embeddings.mT
    return similar.fill_diagonal_(-torch.inf).topk(count, dim=1).indices


def _errors(ours: Tensor, theirs: Tensor, mask: Tensor | None) -> Tensor:
    """(b,)"""
    kept: Any = 1 if mask is None else mask[..., None]
    ours, theirs = ours.float() * kept, theirs.float() * kept
    return (ours - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1).clamp(min=1e-30)
