"""Weights from one model into another, and what became of each."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Row:
    """One weight, or one weight of several layers."""

    status: str
    """mapped: taken over. left: of the source, not used. new: of the result, not from the source."""
    source: str = ""
    target: str = ""
    shape: tuple[int, ...] = ()
    note: str = ""
    count: int = 1


@dataclass(frozen=True)
class Conversion:
    model: PreTrainedModel
    rows: list[Row]


@torch.no_grad()
def transfer(
    state: Mapping[str, Tensor],
    model: PreTrainedModel,
    names: Mapping[str, str | None],
    *,
    notes: Mapping[str, str],
    why_left: Callable[[str, Tensor], str],
    start_at_zero: str,
) -> list[Row]:
    """Copy `state` into `model`, each weight under the name that `names` gives it.

    `notes` are remarks on single weights of `state`. New weights whose name matches `start_at_zero` become 0, others
    stay as they were initialised.
    """
    own, mapped, left = model.state_dict(), [], []
    for key, tensor in state.items():
        name = names[key]
        if name is None or name not in own:
            left.append(Row(status="left", source=key, shape=tuple(tensor.shape), note=why_left(key, tensor)))
            continue
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"{key} has shape {tuple(tensor.shape)}, {name} needs {tuple(own[name].shape)}: "
                f"check that the source's config.json belongs to its weights."
            )
        own[name].copy_(tensor)
        mapped.append(Row(status="mapped", source=key, target=name, shape=tuple(tensor.shape), note=notes.get(key, "")))
    filled = {row.target for row in mapped}
    filled |= {tied for tied, origin in model.all_tied_weights_keys.items() if origin in filled}
    new = []
    for name in own:
        if name not in filled:
            is_zero = re.search(start_at_zero, name) is not None
            if is_zero:
                own[name].zero_()
            note = "zero: no effect until trained" if is_zero else "random: train it"
            new.append(Row(status="new", target=name, shape=tuple(own[name].shape), note=note))
    return [*mapped, *left, *new]


def grouped(rows: Iterable[Row]) -> list[Row]:
    """Rows for people: those of all layers as one, weight and bias as one.

    >>> rows = [Row(status="left", source=f"layer.{i}.query.{part}") for i in range(12) for part in ("weight", "bias")]
    >>> [(row.source, row.count) for row in grouped(rows)]
    [('layer.*.query.weight, bias', 24)]
    """
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        source, target = (_stem(key) for key in (row.source, row.target))
        groups.setdefault((row.status, source, target, row.note), []).append(row)
    merged = []
    for (status, source, target, note), members in groups.items():
        parts = dict.fromkeys(_part(row.source or row.target) for row in members)  # in order, each once
        ending = "." + ", ".join(parts) if any(parts) else ""
        source, target = (stem + ending if stem else "" for stem in (source, target))
        shape, count = members[0].shape, sum(row.count for row in members)
        merged.append(Row(status=status, source=source, target=target, shape=shape, note=note, count=count))
    return merged


def _stem(key: str) -> str:
    return re.sub(r"(^|\.)layer\.\d+\.", r"\1layer.*.", re.sub(r"\.(weight|bias)$", "", key))


def _part(key: str) -> str:
    match = re.search(r"\.(weight|bias)$", key)
    return match[1] if match else ""
