"""How closely a model follows another on held-out texts: embeddings, neighbors, hidden states, and its time."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from nystromformer.data.corpus.windows import Windows
from nystromformer.integrations.attention_interface import AttentionCall, attention_of
from nystromformer.integrations.hf_modules import interface_modules
from nystromformer.integrations.layer_attentions import is_listed, layer_choice
from nystromformer.integrations.probe import swap_attention
from nystromformer.progress import steps_bar
from nystromformer.training.distillation_model import Distillation, embedding, hidden_states, token_mask_of

HELD_OUT = "held out"
"""The part of a corpus that is not trained on."""
NEIGHBORS = 10
TIMINGS = 5


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
        return attention_of(call, layer_choice(choices[call.module], options))(call.query, call.key, call.value)

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
