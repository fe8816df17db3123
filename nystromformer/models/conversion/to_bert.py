"""Nyströmformer → BERT, for programs that know BERT only."""

from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    PreTrainedModel,
)

from nystromformer.attention.checks import check_at_least
from nystromformer.models.base import NystromformerPreTrainedModel
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.conversion.from_standard import POSITIONS, SAME_FIELDS, length_note
from nystromformer.models.conversion.layouts import BERT, PREFIX, kind_of
from nystromformer.models.conversion.transfer import Conversion, transfer
from nystromformer.models.positions import tile_positions

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
