"""Embeddings and layers."""

from nystromformer.models.encoder.embeddings import NystromformerEmbeddings
from nystromformer.models.encoder.stack import NystromformerEncoder

__all__ = ["NystromformerEmbeddings", "NystromformerEncoder"]
