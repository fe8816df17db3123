"""Nyströmformer: self-attention in linear time and memory, and the whole system of the AAAI 2021 paper around it."""

from nystromformer.attention import (
    NystromAttention,
    build_attention,
    nystrom_attention,
    nystrom_attention_weights,
)

from nystromformer.version import __version__

__all__ = [
    "NystromAttention",
    "__version__",
    "build_attention",
    "nystrom_attention",
    "nystrom_attention_weights",
]
