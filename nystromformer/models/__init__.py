"""Nyströmformer models for Transformers: configuration, encoder, heads, conversion of other models' weights."""

from nystromformer.models.configuration import PRESETS, NystromformerConfig, preset_config
from nystromformer.models.heads import (
    NystromformerForMultipleChoice,
    NystromformerForQuestionAnswering,
    NystromformerForSequenceClassification,
    NystromformerForTokenClassification,
)
from nystromformer.models.model import NystromformerModel, NystromformerPreTrainedModel
from nystromformer.models.pretraining_heads import NystromformerForMaskedLM, NystromformerForPreTraining

__all__ = [
    "PRESETS",
    "NystromformerConfig",
    "NystromformerForMaskedLM",
    "NystromformerForMultipleChoice",
    "NystromformerForPreTraining",
    "NystromformerForQuestionAnswering",
    "NystromformerForSequenceClassification",
    "NystromformerForTokenClassification",
    "NystromformerModel",
    "NystromformerPreTrainedModel",
    "preset_config",
]
