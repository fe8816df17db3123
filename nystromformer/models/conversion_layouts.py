"""How families of checkpoints name what a Nyströmformer has.

The encoders of BERT and RoBERTa have our names already, up to the prefix. Their heads do not.
"""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from nystromformer.checks import did_you_mean
from nystromformer.models.heads import (
    NystromformerForQuestionAnswering,
    NystromformerForSequenceClassification,
    NystromformerForTokenClassification,
)
from nystromformer.models.model import NystromformerModel, NystromformerPreTrainedModel
from nystromformer.models.pretraining_heads import NystromformerForMaskedLM, NystromformerForPreTraining

OURS: dict[str, type[NystromformerPreTrainedModel]] = {
    "Model": NystromformerModel,
    "ForPreTraining": NystromformerForPreTraining,
    "ForMaskedLM": NystromformerForMaskedLM,
    "ForSequenceClassification": NystromformerForSequenceClassification,
    "ForTokenClassification": NystromformerForTokenClassification,
    "ForQuestionAnswering": NystromformerForQuestionAnswering,
}
"""The kinds of model that convert with their head, by the end of the class name; others convert without."""


PREFIX = NystromformerPreTrainedModel.base_model_prefix + "."

SAME_NAMES = {
    "ForTokenClassification": {"classifier.": "classifier."},
    "ForQuestionAnswering": {"qa_outputs.": "qa_outputs."},
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Names in one family: for each kind of model, the beginnings of its heads' keys and ours."""

    heads: dict[str, dict[str, str]]
    skips_padding_position: bool
    """Positions start after the padding's row, as in RoBERTa."""
    head_activation: str | None = None
    """The MLM head's activation where it is not the model's own."""

    def position_offset(self, config: PreTrainedConfig) -> int:
        return config.pad_token_id + 1 if self.skips_padding_position else 0

    def our_name(self, key: str, kind: str, prefix: str) -> str | None:
        """Our name for the weight `key` of a model of this kind with base prefix `prefix`; None where we have none.

        >>> LAYOUTS["roberta"].our_name("lm_head.layer_norm.bias", "ForMaskedLM", "roberta.")
        'cls.predictions.transform.LayerNorm.bias'
        >>> LAYOUTS["bert"].our_name("encoder.layer.0.output.dense.bias", "Model", "bert.")
        'encoder.layer.0.output.dense.bias'
        """
        for theirs, ours in self.heads.get(kind, {}).items():
            if key.startswith(theirs):
                return ours + key.removeprefix(theirs)
        if kind == "Model":
            return key.removeprefix(prefix)
        return PREFIX + key.removeprefix(prefix) if key.startswith(prefix) else None


BERT = Layout(
    skips_padding_position=False,
    heads=SAME_NAMES
    | {
        "ForMaskedLM": {"cls.predictions.": "cls.predictions."},
        # The next-sentence head is the best start for sentence order: class 0 is "in order" in both.
        "ForPreTraining": {"cls.": "cls."},
        # BERT's pooler and classifier are the two layers of our classifier.
        "ForSequenceClassification": {"bert.pooler.dense.": "classifier.dense.", "classifier.": "classifier.out_proj."},
    },
)

ROBERTA = Layout(
    skips_padding_position=True,
    head_activation="gelu",
    heads=SAME_NAMES
    | {
        "ForMaskedLM": {
            "lm_head.dense.": "cls.predictions.transform.dense.",
            "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
            "lm_head.decoder.": "cls.predictions.decoder.",
            "lm_head.bias": "cls.predictions.bias",
        },
        "ForSequenceClassification": {"classifier.": "classifier."},
    },
)

LAYOUTS: dict[str, Layout] = {"bert": BERT, "roberta": ROBERTA, "xlm-roberta": ROBERTA, "camembert": ROBERTA}
"""By `model_type`. MiniLM is of type "bert"."""


def layout_of(config: PreTrainedConfig) -> Layout:
    """The layout of a source, which must be an encoder with absolute positions."""
    if config.model_type not in LAYOUTS:
        raise ValueError(
            f"model_type {config.model_type!r}: can convert {', '.join(LAYOUTS)}."
            f"{did_you_mean(config.model_type, LAYOUTS)}"
        )
    if getattr(config, "is_decoder", False):
        raise ValueError("is_decoder=True: Nyström attention can't be causal; give an encoder (is_decoder=False).")
    if (kind := getattr(config, "position_embedding_type", None) or "absolute") != "absolute":
        raise ValueError(f"position_embedding_type={kind!r}: only 'absolute' positions can be converted.")
    return LAYOUTS[config.model_type]


def kind_of(architecture: str | None) -> str:
    """The kind of model that a class name tells.

    >>> kind_of("BertForMaskedLM"), kind_of("BertForMultipleChoice"), kind_of(None)
    ('ForMaskedLM', 'Model', 'Model')
    """
    return next((kind for kind in OURS if kind != "Model" and (architecture or "").endswith(kind)), "Model")
