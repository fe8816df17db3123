"""A classifier from any encoder, with the attention, the length and the head that a task asks for."""

import copy
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from transformers import PreTrainedConfig as Config
from transformers import PreTrainedTokenizerBase as Tokenizer

from nystromformer.attention.nystrom.core import NystromOptions
from nystromformer.attention.registry import ATTENTIONS, parse_attention_name
from nystromformer.checks import check_odd
from nystromformer.integrations.hf.attention_interface import stated_options
from nystromformer.integrations.hf.guarded_models import REMEMBERED
from nystromformer.integrations.hf.layer_attentions import EXACT, listed
from nystromformer.integrations.hf.skip_convolution import ATTRIBUTE as CONVOLUTION
from nystromformer.integrations.hf.skip_convolution import FIELD, add_skip_convolution
from nystromformer.integrations.offered import OFFERED, OPTIONS, chosen
from nystromformer.models import NystromformerConfig
from nystromformer.models.conversion import POSITIONS, convert_model, convert_own
from nystromformer.models.conversion_layouts import LAYOUTS, kind_of, layout_of
from nystromformer.models.encoder import tile_positions
from nystromformer.models.loading import (
    check_checkpoint,
    check_reads_text,
    load_any_tokenizer,
    load_checkpoint,
    read_config,
    refuse_lacking,
    wrong_keys,
)
from nystromformer.models.model import quiet_transformers

HEAD = "ForSequenceClassification"

ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attention_dropout")
"""Fields of Transformers' configurations for dropout that Nyström attention, having no such matrix, can't do."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A pretrained encoder, known by its configuration; checked when made."""

    name: str
    new_head: bool = False
    """Whether a head for another number of labels may be replaced."""

    def __post_init__(self) -> None:
        check_reads_text(self.name, check_checkpoint(self.name))

    def fields(self) -> dict[str, Any]:
        return read_config(self.name)

    def config(self, **changes: Any) -> Config:
        return AutoConfig.from_pretrained(self.name, **changes)

    @property
    def is_own(self) -> bool:
        return self.fields().get("model_type") == NystromformerConfig.model_type

    @property
    def attention(self) -> str:
        """What it comes with; where its layers differ, that of most of those that are not exact."""
        config, saved = self.config(), self.fields().get(REMEMBERED)
        if self.is_own:
            return config.attention
        if saved not in OFFERED:
            return EXACT
        names = [name for name in listed(config) or () if name != EXACT]
        landmarks = (OPTIONS[saved] | stated_options(config))["num_landmarks"]
        return max(names, key=names.count) if names else f"{saved}-{landmarks}"

    def conv_kernel_size(self, attention: str, given: int | None = None) -> int | None:
        """Taps of the skip convolution that the model has with `attention`, None for none.

        `given` is what was asked for, 0 for none: refused where the attention takes no convolution, or where a model of
        Transformers was saved with another. Without it a model keeps what it has.
        """
        takes = takes_convolution(attention)
        if given and not takes:
            can = ", ".join(name for name in ATTENTIONS if takes_convolution(name))
            raise ValueError(
                f"--conv-kernel-size {given}: {attention} takes no convolution, only {can} do; leave out the option "
                f"or this attention."
            )
        if given:
            check_odd("--conv-kernel-size", given)
        field = "conv_kernel_size" if self.is_own else FIELD
        has = getattr(self.config(), field, None) if takes else None
        if given is not None and has is not None and not self.is_own and given != has:
            raise ValueError(
                f"--conv-kernel-size {given}: {self.name} was saved with convolutions of {has}, which it keeps; leave "
                f"the option out."
            )
        return has if given is None else given or None

    @property
    def max_length(self) -> int | None:
        """The longest input that it has positions for; None where it does not say."""
        config = self.config()
        length = getattr(config, "max_position_embeddings", None)
        if length is None or length < 1 or self.is_own or config.model_type not in LAYOUTS:
            return length
        return length - layout_of(config).position_offset(config)

    def tokenizer(self, name: str = "") -> Tokenizer:
        name = name or self.name
        tokenizer = load_any_tokenizer(name)
        if len(tokenizer) > self.config().vocab_size:
            raise ValueError(
                f"{name}: a tokenizer of {len(tokenizer):,} entries, but {self.name} has room for "
                f"{self.config().vocab_size:,}: give the tokenizer it was trained with as --tokenizer."
            )
        return tokenizer

    def check_head(self, labels: tuple[str, ...] | None) -> None:
        """Refuse a model whose head is for another number of labels."""
        needed = 1 if labels is None else len(labels)
        fields = self.fields()
        architecture = next(iter(fields.get("architectures") or []), None)
        has = self.config().num_labels
        if kind_of(architecture) == HEAD and has != needed and not self.new_head:
            what = "one number" if labels is None else f"{needed} labels ({', '.join(labels[:6])})"
            raise ValueError(
                f"{self.name}: its head has {has} outputs, the task needs {what}; give a model without a head, or "
                f"start a new one with --new-head."
            )

    def check_length(self, max_length: int) -> None:
        """Refuse a length that the model has no positions for and can't be given."""
        room = self.max_length
        if room is not None and max_length > room and not self.is_own and self.config().model_type not in LAYOUTS:
            raise ValueError(
                f"--max-length {max_length}: {self.name} has {room} positions, and those of type "
                f"{self.config().model_type!r} can't be tiled (can: nystromformer, {', '.join(LAYOUTS)}); use at most "
                f"{room}."
            )


def interface_name(attention: str) -> str | None:
    """What `attn_implementation=` calls an attention, None if Transformers' attention interface does not offer it.

    >>> interface_name("nystrom-local-64"), interface_name("linear")
    ('nystrom-local', None)
    """
    name = parse_attention_name(attention)[0].name
    return name if name in OFFERED else None


def takes_convolution(attention: str) -> bool:
    """
    >>> takes_convolution("nystrom-64"), takes_convolution("standard")
    (True, False)
    """
    return parse_attention_name(attention)[0].takes_convolution


def load_classifier(
    source: Source,
    *,
    attention: str,
    max_length: int,
    labels: tuple[str, ...] | None,
    conv_kernel_size: int | None = None,
) -> PreTrainedModel:
    """The model with a head for `labels` (None: one number), `attention`, and room for `max_length` tokens.

    `conv_kernel_size` is as for `Source.conv_kernel_size`; a convolution that is new starts at zero.

    Our own models get the attention by configuration. In others, `standard` is Transformers' own, and what its
    attention interface offers goes in there (call `nystromformer.register()` before); for any other attention BERT-like
    models are converted.
    """
    source.check_head(labels)
    source.check_length(max_length)
    kernel_size = source.conv_kernel_size(attention, conv_kernel_size)
    longer = max_length if source.max_length is not None and max_length > source.max_length else None
    with quiet_transformers():
        if source.is_own:
            model = loaded(source, source.config(**head_fields(labels)))
            changes: dict[str, Any] = {} if attention == source.attention else {"attention": attention}
            if takes_convolution(attention) and kernel_size != source.config().conv_kernel_size:
                changes["conv_kernel_size"] = kernel_size
            return convert_own(model, max_length=longer, **changes).model if changes or longer else model
        config = source.config(**head_fields(labels))
        name = interface_name(attention)
        if listed(config) is not None and attention == source.attention:
            model = loaded(source, config)  # as it was saved, layer by layer
        elif name is not None:
            config.attention_layers = None
            _, size = parse_attention_name(attention)
            config.num_landmarks = size.get("num_landmarks", NystromOptions.num_landmarks)
            # Attentions are compared: what the name says is what short texts get, too, as in our own models.
            config.attention_options = {"exact_below": None, **(getattr(config, "attention_options", None) or {})}
            for dropout in ATTENTION_DROPOUTS:
                if hasattr(config, dropout):
                    setattr(config, dropout, 0.0)
            model = loaded(source, config, attn_implementation=name)
        else:
            was_linear = source.attention != EXACT
            # with the fastest exact attention that it has
            model = loaded(source, config, **({"attn_implementation": "sdpa"} if was_linear else {}))
            if attention != EXACT:
                return convert_model(model, max_length=longer, attention=attention).model
        model = with_positions(model, longer) if longer else model
        return model if kernel_size is None else add_skip_convolution(model, kernel_size)


def check_attention(source: Source, attention: str, conv_kernel_size: int | None = None) -> None:
    """Refuse attentions that are unknown, or that this model can't be given, or not with this convolution."""
    offered = attention == "standard" or interface_name(attention) is not None
    if source.is_own:
        source.config(attention=attention, num_landmarks=None)
    elif not offered and source.config().model_type not in LAYOUTS:
        raise ValueError(
            f"--attention {attention}: {source.name} is of type {source.config().model_type!r}, which can only have "
            f"standard, {' and '.join(OFFERED)}; models of type {', '.join(LAYOUTS)} can be converted to any other."
        )
    elif offered and attention != "standard":
        chosen(attention, {})
    source.conv_kernel_size(attention, conv_kernel_size)


def head_fields(labels: tuple[str, ...] | None) -> dict[str, Any]:
    """Fields of the configuration that say what the head is for."""
    names = ("score",) if labels is None else labels
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "num_labels": len(names),
        "problem_type": "regression" if labels is None else "single_label_classification",
    }


def loaded(source: Source, config: Config, **options: Any) -> PreTrainedModel:
    """The model with the weights of its checkpoint. Only a head may be new."""
    model, info = load_checkpoint(AutoModelForSequenceClassification, source.name, config=config, **options)
    encoder = [key for key in wrong_keys(info) if key.startswith(model.base_model_prefix + ".")]
    new = ["pooler", ".conv."]
    if listed(config) is None and listed(source.config()) is not None:  # layers that were exact had no convolution
        new.append(f".{CONVOLUTION}.")
    refuse_lacking(source.name, model, {key for key in encoder if not any(part in key for part in new)})
    return model


def with_positions(model: PreTrainedModel, length: int) -> PreTrainedModel:
    """A BERT-like model of Transformers with room for `length` tokens: its learned positions are repeated."""
    offset = layout_of(model.config).position_offset(model.config)
    config, state = copy.deepcopy(model.config), model.state_dict()
    config.max_position_embeddings = length + offset
    positions = next(key for key in state if key.endswith(POSITIONS))
    state[positions] = tile_positions(state[positions], offset, length)
    longer = type(model)(config)
    longer.load_state_dict(state)
    return longer
