"""Weights of other models for ours, and ours for others."""

from nystromformer.models.conversion.agreement import largest_difference
from nystromformer.models.conversion.checkpoints import load_source
from nystromformer.models.conversion.from_own import convert_own
from nystromformer.models.conversion.from_standard import convert_model
from nystromformer.models.conversion.to_bert import convert_to_bert
from nystromformer.models.conversion.transfer import Conversion, Row, grouped

__all__ = [
    "Conversion",
    "Row",
    "convert_model",
    "convert_own",
    "convert_to_bert",
    "grouped",
    "largest_difference",
    "load_source",
]
