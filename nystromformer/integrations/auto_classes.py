"""Transformers' Auto classes build our models for `model_type` "nystromformer"."""

from nystromformer.models import (
    NystromformerConfig,
    NystromformerForMaskedLM,
    NystromformerForMultipleChoice,
    NystromformerForPreTraining,
    NystromformerForQuestionAnswering,
    NystromformerForSequenceClassification,
    NystromformerForTokenClassification,
    NystromformerModel,
)

MODELS = {
    "AutoModel": NystromformerModel,
    "AutoModelForPreTraining": NystromformerForPreTraining,
    "AutoModelForMaskedLM": NystromformerForMaskedLM,
    "AutoModelForSequenceClassification": NystromformerForSequenceClassification,
    "AutoModelForTokenClassification": NystromformerForTokenClassification,
    "AutoModelForQuestionAnswering": NystromformerForQuestionAnswering,
    "AutoModelForMultipleChoice": NystromformerForMultipleChoice,
}


def register_auto_classes() -> None:
    """From now on `AutoModel.from_pretrained` and pipelines load Nyströmformer checkpoints as our models."""
    import transformers

    # Transformers has a model of its own under this name: exist_ok replaces it in this process
    transformers.AutoConfig.register(NystromformerConfig.model_type, NystromformerConfig, exist_ok=True)
    for name, model in MODELS.items():
        getattr(transformers, name).register(NystromformerConfig, model, exist_ok=True)
