"""How far an attention of linear cost is from the exact one, layer by layer and head by head of a model that runs.

Each layer is given what it gets in the exact model, so that its error is its own and not that of layers before it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nystromformer.integrations.attention_interface import attention_map, attention_of
from nystromformer.integrations.interface_calls import AttentionCall
from nystromformer.integrations.substitution import exact_attention


@dataclass(frozen=True)
class HeadErrors:
    """Relative errors of one layer, for each example and head, (b, h)."""

    matrix: Tensor
    """‖Ŝ − S‖ / ‖S‖ of the attention matrices, in the Frobenius norm."""
    output: Tensor
    """‖Ŝ V − S V‖ / ‖S V‖ of what attention gives."""


def head_errors(call: AttentionCall, operation: Callable[..., Tensor], num_landmarks: int) -> HeadErrors:
    """Errors of `operation`, such as `nystrom_attention`, for a captured call.

    >>> from nystromformer import nystrom_attention
    >>> x = torch.randn(1, 2, 50, 8)
    >>> call = AttentionCall(None, x, x, x, query_mask=None, key_mask=None, radius=None, scale=None)
    >>> bool(head_errors(call, nystrom_attention, num_landmarks=50).matrix.max() < 1e-5)  # as many as tokens
    True
    """
    attend = attention_of(call, operation, num_landmarks)
    return HeadErrors(
        matrix=relative_error(attention_map(attend, call.query, call.key), exact_map(call)),
        output=relative_error(attend(call.query, call.key, call.value), exact_attention(call)),
    )


def exact_map(call: AttentionCall) -> Tensor:
    """The attention matrix (b, h, n, s) itself."""
    return attention_map(lambda query, key, value: exact_attention(replace(call, value=value)), call.query, call.key)


def approximate_map(call: AttentionCall, operation: Callable[..., Tensor], num_landmarks: int) -> Tensor:
    """The matrix (b, h, n, s) that `operation` multiplies values with; entries can be slightly negative."""
    return attention_map(attention_of(call, operation, num_landmarks), call.query, call.key)


def relative_error(approximation: Tensor, exact: Tensor) -> Tensor:
    """‖approximation − exact‖ / ‖exact‖ over the last two dimensions; masked rows are 0 in both."""
    norms = [torch.linalg.matrix_norm(x.float()) for x in (approximation.float() - exact.float(), exact)]
    return norms[0] / norms[1].clamp(min=torch.finfo(torch.float32).tiny)
