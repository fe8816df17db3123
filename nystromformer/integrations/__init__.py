"""Nyströmformer within other libraries."""

from nystromformer.integrations.auto_classes import register_auto_classes

__all__ = ["register", "register_auto_classes"]


def register() -> None:
    """Make Transformers know Nyströmformer: `AutoModel…` and pipelines load our models. Safe to call again.

    >>> register()
    >>> from transformers import AutoConfig
    >>> type(AutoConfig.for_model("nystromformer")).__module__
    'nystromformer.models.configuration'
    """
    register_auto_classes()
