"""Inner loops of Nyström attention in machine code, for CPUs where the package was installed with a C compiler."""

from nystromformer.attention.native.functions import (
    MOST_COLUMNS,
    column_sums,
    far_means,
    fields_attention,
    local_attention,
    moments,
    near_attention,
    pinv,
    pinv_gradient,
    ridge_values,
    ridge_values_kept,
    skip,
    skip_kernel_gradient,
    thin_attention,
    whole_attention,
)
from nystromformer.attention.native.library import instructions, runs_native, without_native
from nystromformer.attention.native.local_operators import Core

__all__ = [
    "MOST_COLUMNS",
    "Core",
    "column_sums",
    "far_means",
    "fields_attention",
    "instructions",
    "local_attention",
    "moments",
    "near_attention",
    "pinv",
    "pinv_gradient",
    "ridge_values",
    "ridge_values_kept",
    "runs_native",
    "skip",
    "skip_kernel_gradient",
    "thin_attention",
    "whole_attention",
    "without_native",
]
