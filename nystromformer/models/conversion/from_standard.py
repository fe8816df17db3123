"""BERT-like models → Nyströmformer: the paper's "from standard"."""

from transformers import PreTrainedConfig, PreTrainedModel

from nystromformer.attention.checks import check_at_least
from nystromformer.models.configuration import NystromformerConfig
from nystromformer.models.conversion.layouts import OURS, Layout, kind_of, layout_of
from nystromformer.models.conversion.transfer import Conversion, transfer
from nystromformer.models.positions import tile_positions

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
    **changes: object,
) -> Conversion:
    """A Nyströmformer with the weights of `source`, a BERT- or RoBERTa-like model of Transformers.

    Skip convolutions start at zero, so that the model starts with the source's behaviour: with at most
    `num_landmarks` tokens its hidden states are the source's. `max_length` lengthens the position table by tiling.
    `changes` are fields of `NystromformerConfig`, such as `attention="nystrom-128"`. Heads are kept where we have the
    same; others are left.

    >>> from transformers import BertConfig, BertModel
    >>> bert = BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16))
    >>> model = convert_model(bert, max_length=4096).model
    >>> type(model).__name__, model.config.max_position_embeddings
    ('NystromformerModel', 4096)
    """
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


def our_fields(config: PreTrainedConfig, kind: str) -> dict[str, object]:
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
