"""Nyströmformer within other libraries: `register()` for Transformers, and attention of linear cost in any model."""

import sys
from typing import Any

from nystromformer.errors import install_hint

AUTO_CLASSES = {
    "AutoModel": "NystromformerModel",
    "AutoModelForPreTraining": "NystromformerForPreTraining",
    "AutoModelForMaskedLM": "NystromformerForMaskedLM",
    "AutoModelForSequenceClassification": "NystromformerForSequenceClassification",
    "AutoModelForTokenClassification": "NystromformerForTokenClassification",
    "AutoModelForQuestionAnswering": "NystromformerForQuestionAnswering",
    "AutoModelForMultipleChoice": "NystromformerForMultipleChoice",
}
"""Which of our models each Auto class of Transformers builds."""


def register() -> None:
    """Make Transformers know Nyströmformer. Safe to call again.

    `AutoModel…` and pipelines load our models for `model_type` "nystromformer", and `attn_implementation="nystrom"`
    works for other encoders. PEFT, if it is imported before, knows our models' layers.

    >>> register()
    >>> from transformers import AutoConfig
    >>> type(AutoConfig.for_model("nystromformer")).__module__
    'nystromformer.models.configuration'
    """
    try:  # imported here: other files of this folder need torch alone
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError(f"register needs transformers: {install_hint('models')}.") from error

    from nystromformer import models
    from nystromformer.integrations.hf.adapters import remember_in_adapters
    from nystromformer.integrations.hf.attention_interface import register_attention
    from nystromformer.integrations.hf.guarded_models import guard_models

    # Transformers has a model of its own under this name: exist_ok replaces it in this process
    config = models.NystromformerConfig
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto_class, model in AUTO_CLASSES.items():
        getattr(transformers, auto_class).register(config, getattr(models, model), exist_ok=True)
    register_attention()
    guard_models()
    remember_in_adapters()
    if (constants := sys.modules.get("peft.utils.constants")) is not None:
        _name_peft_targets(vars(constants), config.model_type)


def _name_peft_targets(constants: dict[str, Any], model_type: str) -> None:
    """Let PEFT put adapters where it puts them in BERT, whose layers have the same names, unless told otherwise."""
    for name, targets in constants.items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(targets, dict) and "bert" in targets:
            targets.setdefault(model_type, targets["bert"])
