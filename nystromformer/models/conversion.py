"""Weights from BERT-like models to ours, from ours to ours, and back, with what became of each tensor."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    PreTrainedConfig,
    PreTrainedModel,
)

from nystromformer.attention.base import attentions_in
from nystromformer.checks import check_at_least
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.conversion_layouts import BERT, OURS, PREFIX, Layout, kind_of, layout_of
from nystromformer.models.encoder import tile_positions
from nystromformer.models.loading import check_checkpoint, load_checkpoint, read_config, refuse_lacking, wrong_keys
from nystromformer.models.model import NystromformerPreTrainedModel


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
    stay as they were initialized.
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


AUTO_CLASSES = {
    "Model": "AutoModel",
    "ForPreTraining": "AutoModelForPreTraining",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForQuestionAnswering": "AutoModelForQuestionAnswering",
}


def load_source(name: str) -> tuple[PreTrainedModel, list[Row]]:
    """The model of a checkpoint, with its head where that can be converted; and the weights that found no place in it.

    A checkpoint that lacks weights is refused, and so are pickles and weights that can't be read.
    """
    fields = read_config(name)
    config = check_checkpoint(name)
    kind = kind_of(next(iter(fields.get("architectures") or []), None))
    if fields.get("model_type") == NystromformerConfig.model_type:
        loader = OURS[kind]
    else:
        layout_of(config)
        loader = getattr(transformers, AUTO_CLASSES[kind])
    model, info = load_checkpoint(loader, name)
    wrong = wrong_keys(info)
    if kind == "Model" and wrong and all(key.startswith("pooler.") for key in wrong):
        model.pooler, wrong = None, set()  # many checkpoints come without; a random one would be no conversion
    refuse_lacking(name, model, wrong)
    surplus = [Row(status="left", source=key, note="not used by the source either") for key in info["unexpected_keys"]]
    return model, sorted(surplus, key=lambda row: row.source)


LENGTH = 16


@torch.no_grad()
def largest_difference(source: PreTrainedModel, model: PreTrainedModel, seed: int = 0) -> float | None:
    """The largest difference of the last hidden states on a few random tokens, as many as keep the attention exact.

    None where the attention of either model approximates input of any length.
    """
    length = int(min([LENGTH, *(each.exact_up_to for both in (source, model) for each in attentions_in(both))]))
    if length == 0:
        return None
    generator = torch.Generator().manual_seed(seed)
    # ids from the upper half of the vocabulary: special tokens, padding among them, have small numbers
    size = source.config.vocab_size
    ids = torch.randint(size // 2, size, (2, length), generator=generator)
    return float((hidden_states(source, ids) - hidden_states(model, ids)).abs().max())


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model.base_model(input_ids=ids).last_hidden_state.float()


SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "type_vocab_size",
    "layer_norm_eps",
    "initializer_range",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "classifier_dropout",
    "id2label",
    "label2id",
    "problem_type",
)
"""Fields that BERT, RoBERTa and Nyströmformer have in common."""

PAPER_KERNEL = 33

POSITIONS = "embeddings.position_embeddings.weight"


def convert_model(
    source: PreTrainedModel,
    *,
    max_length: int | None = None,
    conv_kernel_size: int | None = PAPER_KERNEL,
    **changes: Any,
) -> Conversion:
    """A Nyströmformer with the weights of `source`, a BERT- or RoBERTa-like model of Transformers.

    Skip convolutions start at zero, so that the model starts with the source's behavior: with at most
    `num_landmarks` tokens its hidden states are the source's. `max_length` lengthens the position table by tiling.
    `changes` are fields of `NystromformerConfig`, such as `attention="nystrom-128"`. Heads are kept where we have the
    same; others are left.

    >>> from transformers import BertConfig, BertModel
    >>> bert = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16))
    >>> model = convert_model(bert, max_length=4096).model
    >>> type(model).__name__, model.config.max_position_embeddings
    ('NystromformerModel', 4096)
    """
    check_keeps_positions("learned", changes)
    layout, kind = layout_of(source.config), kind_of(type(source).__name__)
    state, names = source.state_dict(), names_for(source, layout, kind)
    positions = next(key for key in state if key.endswith(POSITIONS))
    offset = layout.position_offset(source.config)
    before = state[positions].shape[0] - offset
    length = before if max_length is None else max_length
    check_at_least("max_length", length, 1)
    state[positions] = tile_positions(state[positions], offset, length)
    fields = {
        **our_fields(source.config, kind),
        "position_offset": offset,
        "max_position_embeddings": length,
        "conv_kernel_size": conv_kernel_size,
        "add_pooler": any(name is not None and "pooler.dense" in name for name in names.values()),
    }
    model = OURS[kind](NystromformerConfig(**fields | changes)).to(source.dtype).eval()
    rows = transfer(
        state,
        model,
        names,
        notes=length_note(positions, before, length),
        why_left=lambda key, tensor: "no such part here",
        start_at_zero=r"\.conv\.weight$",
    )
    return Conversion(model, rows)


def our_fields(config: PreTrainedConfig, kind: str) -> dict[str, Any]:
    """Fields of `NystromformerConfig` that follow from another model's configuration."""
    fields = {name: getattr(config, name) for name in SAME_FIELDS if hasattr(config, name)}
    if kind == "ForSequenceClassification":
        fields["classifier_activation"] = "tanh"
    return fields | {"norm": "post", "embedding_norm": True, "pooling": "cls"}


def names_for(source: PreTrainedModel, layout: Layout, kind: str) -> dict[str, str | None]:
    """Our name of each weight of `source`, None where there is none."""
    prefix = source.base_model_prefix + "."
    names = {key: layout.our_name(key, kind, prefix) for key in source.state_dict()}
    if kind == "ForMaskedLM" and layout.head_activation not in (None, source.config.hidden_act):
        # our head takes the model's activation, theirs has its own: with another one it would be another head
        names |= {key: None for key, name in names.items() if name is not None and name.startswith("cls.")}
    return names


def length_note(key: str, before: int, after: int) -> dict[str, str]:
    if before == after:
        return {}
    return {key: f"{before} positions {'tiled' if after > before else 'cut'} to {after}"}


def convert_own(source: NystromformerPreTrainedModel, *, max_length: int | None = None, **changes: Any) -> Conversion:
    """The same model with `changes` to its configuration, such as `attention="standard"`, and positions tiled.

    >>> from nystromformer import NystromformerModel
    >>> config = NystromformerConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
    >>> convert_own(NystromformerModel(config), max_length=1024, conv_kernel_size=33).model.config.conv_kernel_size
    33
    """
    check_keeps_positions(source.config.positions, changes)
    state, before = source.state_dict(), source.config.max_position_embeddings
    length = before if max_length is None else max_length
    check_at_least("max_length", length, 1)
    notes: dict[str, str] = {}
    for key in [key for key in state if key.endswith(POSITIONS)]:  # none where positions are rotary
        state[key] = tile_positions(state[key], source.config.position_offset, length)
        notes |= length_note(key, before, length)
    fields = source.config.to_dict() | {"max_position_embeddings": length}
    if "attention" in changes:
        fields["num_landmarks"] = None  # the new name's number decides, where it has one
    model = type(source)(NystromformerConfig(**fields | changes)).to(source.dtype).eval()
    own = model.state_dict()
    # only parts of the attention can have changed their shape
    names = {key: key if key in own and own[key].shape == tensor.shape else None for key, tensor in state.items()}
    rows = transfer(
        state,
        model,
        names,
        notes=notes,
        why_left=lambda key, tensor: "of the attention before",
        start_at_zero=r"\.conv\.weight$",
    )
    return Conversion(model, rows)


def check_keeps_positions(has: str, changes: dict[str, Any]) -> None:
    given = changes.get("positions", has)
    if given != has:
        raise ValueError(
            f"positions={given!r}: these weights were trained with {has!r} positions and mean nothing with others; "
            f"leave it out, or train a new model."
        )


THEIRS: dict[str, type[PreTrainedModel]] = {
    "Model": BertModel,
    "ForPreTraining": BertForPreTraining,
    "ForMaskedLM": BertForMaskedLM,
    "ForSequenceClassification": BertForSequenceClassification,
    "ForTokenClassification": BertForTokenClassification,
    "ForQuestionAnswering": BertForQuestionAnswering,
}


def convert_to_bert(source: NystromformerPreTrainedModel, *, max_length: int | None = None) -> Conversion:
    """A BERT of Transformers with the weights of `source`: the same model with exact attention and no convolution.

    Models that BERT has no form for are refused; heads that it has no form for are left.

    >>> from nystromformer import NystromformerModel
    >>> config = NystromformerConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16)
    >>> type(convert_to_bert(NystromformerModel(config)).model).__name__
    'BertModel'
    """
    config, state = source.config, source.state_dict()
    check_has_bert_form(config)
    kind = bert_kind(source)
    positions = next(key for key in state if key.endswith(POSITIONS))
    length = config.max_position_embeddings if max_length is None else max_length
    check_at_least("max_length", length, 1)
    state[positions] = tile_positions(state[positions], config.position_offset, length)[config.position_offset :]
    fields = {name: getattr(config, name) for name in SAME_FIELDS} | {
        "max_position_embeddings": length,
        "type_vocab_size": max(config.type_vocab_size, 1),  # BERT has at least one: zeros, where we have none
    }
    has_pooler = {"add_pooling_layer": config.add_pooler and config.pooling == "cls"} if kind == "Model" else {}
    model = THEIRS[kind](BertConfig(**fields), **has_pooler).to(source.dtype).eval()
    ours = {BERT.our_name(name, kind, "bert."): name for name in model.state_dict()}
    rows = transfer(
        state,
        model,
        {key: ours.get(key.removeprefix(PREFIX) if kind == "Model" else key) for key in state},
        notes=length_note(positions, config.max_position_embeddings, length),
        why_left=why_left,
        start_at_zero="token_type_embeddings",
    )
    return Conversion(model, rows)


def check_has_bert_form(config: NystromformerConfig) -> None:
    needed = {
        "norm='post'": config.norm == "post",
        "embedding_norm=True": config.embedding_norm,
        "positions='learned'": config.positions == "learned",
        "an attention with keys of its own": not config.build_attention().shares_query_key,
    }
    for what, is_met in needed.items():
        if not is_met:
            raise ValueError(f"BERT needs {what}, which this model has not: it can't be converted to BERT.")


def bert_kind(source: NystromformerPreTrainedModel) -> str:
    """The kind of BERT that computes the same, without the head where there is none."""
    kind, config = kind_of(type(source).__name__), source.config
    pools_as_bert = config.pooling == "cls"
    if kind == "ForPreTraining" and not (pools_as_bert and config.add_pooler):
        return "ForMaskedLM"
    if kind == "ForSequenceClassification":
        same_size = config.classifier_size in (None, config.hidden_size)
        return kind if pools_as_bert and same_size and config.classifier_activation == "tanh" else "Model"
    return kind


def why_left(key: str, tensor: Tensor) -> str:
    if not key.endswith(".conv.weight"):
        return "BERT has no such part"
    return "BERT has no skip convolution" + ("; it was not zero, so results differ" if bool(tensor.any()) else "")
