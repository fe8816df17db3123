"""Nyströmformer models for Transformers: configuration, encoder, heads, conversion of other models' weights.

Names are imported when first used, so that `nystromformer.models.mil`, which needs torch alone, does not ask for
Transformers.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what `__getattr__` below gives, for type checkers and editors
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

_HOMES = {
    "PRESETS": "configuration",
    "NystromformerConfig": "configuration",
    "preset_config": "configuration",
    "NystromformerModel": "model",
    "NystromformerPreTrainedModel": "model",
    "NystromformerForMaskedLM": "pretraining_heads",
    "NystromformerForPreTraining": "pretraining_heads",
}
"""Where names live that are no heads of tasks."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'nystromformer.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nystromformer.models.{_HOMES.get(name, 'heads')}"), name)
