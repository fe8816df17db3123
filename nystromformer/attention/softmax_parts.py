"""One softmax over several sets of keys, a set at a time.

Attention to each set gives its output and its log-sum-exp; two sets merge by the logistic function of the difference
of their log-sum-exps. So keys that differ from query to query (a near field) and keys that all queries share
(landmarks) meet in one softmax, each with a fused kernel and without a matrix of all queries by all keys.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

MASKED = -1e30
"""The bias of a key that must not be seen. It is finite so that a softmax over such keys alone is no 0/0; the
log-sum-exp of that softmax is so low that its output gets the weight 0 when it is merged."""

FUSED_DEVICES = ("cpu",)
"""Where a fused kernel gives back the log-sum-exp. Elsewhere a matrix of queries by keys exists for a while."""


def softmax_part(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale·Q Kᵀ + bias) V, (g, c, n, d), and its log-sum-exp, (g, c, n), at least in float32.

    `query` is (g, c, n, d), `key` and `value` are (g, c, s, d), `bias` is (g, c, 1, s), at least in float32. Keys
    and values can be overlapping or repeated views. Both results have gradients; `bias` gets none.

    >>> query, key, value = torch.randn(3, 1, 2, 5, 8)
    >>> out, logsumexp = softmax_part(query, key, value, torch.zeros(1, 2, 1, 5), scale=0.1)
    >>> torch.allclose(out, torch.softmax(0.1 * query @ key.mT, dim=-1) @ value, atol=1e-6)
    True
    """
    return _SoftmaxPart.apply(packed(query), packed(key), packed(value), bias, scale)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Attention to the keys of two parts in one softmax, from what `softmax_part` gave for each."""
    (out_1, logsumexp_1), (out_2, logsumexp_2) = first, second
    share = torch.sigmoid(logsumexp_1 - logsumexp_2).to(out_1.dtype).unsqueeze(-1)
    # Both outputs are kept for the backward; without one the result needs no memory of its own.
    return torch.lerp(out_2, out_1, share) if out_2.requires_grad else out_2.lerp_(out_1, share)


class _SoftmaxPart(Function):
    """Keeps the output and the log-sum-exp for the backward, never the weights."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return part_forward(query, key, value, bias, scale)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor, grad_logsumexp: Tensor) -> tuple[Tensor | None, ...]:
        return *part_backward(grad, grad_logsumexp, *ctx.saved_tensors, ctx.scale), None, None


def part_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`softmax_part` without gradients."""
    return (_fused if _has_fused(query) else _plain)(query, key, value, bias, scale)


def part_backward(
    grad: Tensor,
    grad_logsumexp: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from those of the two results of `part_forward`, `out` and `logsumexp`."""
    # d logits = P ∘ (grad Vᵀ − D): for the output D = grad·out, less what comes through the log-sum-exp.
    wide = logsumexp.dtype
    D = torch.linalg.vecdot(grad.to(wide), out.to(wide)) - grad_logsumexp  # (g c n)
    kernel = _fused_backward if _has_fused(query) else _plain_backward
    return kernel(grad, query, key, value, bias, logsumexp, D.unsqueeze(-1), scale)


def packed(x: Tensor) -> Tensor:
    """`x` with each row in one piece, as the kernels read it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _has_fused(x: Tensor) -> bool:
    # An exported graph must also run elsewhere.
    return x.device.type in FUSED_DEVICES and not torch.compiler.is_exporting()


def _fused(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=bias, scale=scale)


def _fused_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, logsumexp: Tensor, D: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel takes `out` only to form D = grad·out: in its place it gets the multiple of `grad` with our D."""
    grad = packed(grad)
    least = torch.finfo(grad.dtype).eps * D.abs()
    size = grad.abs().amax(-1, keepdim=True)
    # A vector of zeros has no multiple that gives D ≠ 0: so small a change is lost in rounding.
    grad = (grad + torch.where(size < least, least, 0)).to(query.dtype)
    size = torch.maximum(size, least).clamp(min=torch.finfo(D.dtype).tiny)
    unit = grad / size
    squares = torch.linalg.vecdot(unit, unit).clamp(min=0.5).unsqueeze(-1)  # at least 1, or 0 where all is 0
    stand_in = unit * (D / size / squares)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, stand_in.to(query.dtype), logsumexp, 0.0, False, attn_mask=bias, scale=scale
    )


def _plain(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    wide = bias.dtype  # logits in half precision would be off by more than small weights can bear
    logits = (scale * query.to(wide)) @ key.to(wide).mT + bias
    return (torch.softmax(logits, dim=-1) @ value.to(wide)).to(value.dtype), torch.logsumexp(logits, dim=-1)


def _plain_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, logsumexp: Tensor, D: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = query.dtype
    grad, query, key, value = (x.to(bias.dtype) for x in (grad, query, key, value))
    P = torch.exp((scale * query) @ key.mT + bias - logsumexp.unsqueeze(-1))  # (g c n s)
    grad_logits = scale * P * (grad @ value.mT - D)
    return (grad_logits @ key).to(dtype), (grad_logits.mT @ query).to(dtype), (P.mT @ grad).to(dtype)
