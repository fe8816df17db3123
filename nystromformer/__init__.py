"""Nyströmformer: self-attention in linear time and memory, and the whole system of the AAAI 2021 paper around it."""

import importlib
from typing import TYPE_CHECKING

from nystromformer.errors import install_hint

if TYPE_CHECKING:  # what `__getattr__` below gives, for type checkers and editors
    from nystromformer.attention import (
        NystromAttention,
        build_attention,
        nystrom_attention,
        nystrom_attention_varlen,
        nystrom_attention_weights,
        nystrom_local_attention_varlen,
    )
    from nystromformer.integrations import register
    from nystromformer.integrations.hf.skip_convolution import add_skip_convolution
    from nystromformer.integrations.replace import replace_attention, restore_attention
    from nystromformer.integrations.sdpa import use_attention
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
    from nystromformer.training.distillation.model import distill

__version__ = "0.1.0"

__all__ = [
    "NystromAttention",
    "NystromformerConfig",
    "NystromformerForMaskedLM",
    "NystromformerForMultipleChoice",
    "NystromformerForPreTraining",
    "NystromformerForQuestionAnswering",
    "NystromformerForSequenceClassification",
    "NystromformerForTokenClassification",
    "NystromformerModel",
    "__version__",
    "add_skip_convolution",
    "build_attention",
    "distill",
    "nystrom_attention",
    "nystrom_attention_varlen",
    "nystrom_attention_weights",
    "nystrom_local_attention_varlen",
    "register",
    "replace_attention",
    "restore_attention",
    "use_attention",
]


_HOMES = {
    "NystromAttention": "attention",
    "add_skip_convolution": "integrations.hf.skip_convolution",
    "build_attention": "attention",
    "distill": "training.distillation.model",
    "nystrom_attention": "attention",
    "nystrom_attention_varlen": "attention",
    "nystrom_attention_weights": "attention",
    "nystrom_local_attention_varlen": "attention",
    "register": "integrations",
    "replace_attention": "integrations.replace",
    "restore_attention": "integrations.replace",
    "use_attention": "integrations.sdpa",
}
"""Where public names live that are no models. All are imported when first used: commands and attentions stay light."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'nystromformer' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"nystromformer.{_HOMES.get(name, 'models')}"), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(f"{name} needs transformers: {install_hint('models')}.") from error


def __dir__() -> list[str]:
    return sorted(__all__)
