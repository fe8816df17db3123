"""Nyströmformer within other libraries."""

from nystromformer.integrations.attention_interface import register_attention
from nystromformer.integrations.auto_classes import register_auto_classes
from nystromformer.integrations.guarded_models import guard_models
from nystromformer.integrations.skip_convolution import add_skip_convolution

__all__ = ["add_skip_convolution", "register", "register_attention", "register_auto_classes"]


def register() -> None:
    """Make Transformers know Nyströmformer. Safe to call again.

    `AutoModel…` and pipelines load our models, and `attn_implementation="nystrom"` works for other encoders.

    >>> register()
    >>> from transformers import AutoConfig
    >>> type(AutoConfig.for_model("nystromformer")).__module__
    'nystromformer.models.configuration'
    """
    register_auto_classes()
    register_attention()
    guard_models()
