"""Performer: softmax attention through positive orthogonal random features, FAVOR+ (Choromanski et al., 2021)."""

from typing import Any

import torch
from torch import Tensor

from nystromformer.attention.base import Attention, Length
from nystromformer.attention.shared.common import (
    at_least_float32,
    check_floating,
    check_self_attention,
    full_precision,
    shape_of,
    zero_masked,
)
from nystromformer.checks import check_at_least, check_number

EPSILON = 1e-4
"""Added to every feature, as published, so that no query is left without weight."""
SMALLEST_NORMALIZER = 1e-12
"""Only reached without valid keys, where the numerator is 0."""
BLOCK_ELEMENTS, SMALLEST_BLOCK = 2**21, 128
"""Features are made for so many elements at a time, at least so many rows: they then stay in the cache, and their
memory is used again. Twice as fast as all at once at n = 4096 in training."""


def draw_projection(num_features: int, head_dim: int, device: torch.device | None = None) -> Tensor:
    """Rows (num_features, d), each distributed as N(0, I), orthogonal within every block of d rows.

    >>> w = draw_projection(6, 4)
    >>> (w[:4] @ w[:4].T).fill_diagonal_(0).abs().max() < 1e-5
    tensor(True)
    """
    blocks = -(-num_features // head_dim)
    q, r = torch.linalg.qr(torch.randn(blocks, head_dim, head_dim, device=device))
    # QR alone fixes the signs (a first entry is always negative), which biases the features; this makes q uniform
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    norms = torch.randn(num_features, head_dim, device=device).norm(dim=1, keepdim=True)
    return q.mT.reshape(-1, head_dim)[:num_features] * norms


def random_features(x: Tensor, projection: Tensor, is_query: bool, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """exp(W x̂ - |x̂|² / 2 - c) with x̂ = x d^(-1/4), without the epsilon: (b, h, n, m), 0 for masked rows; and c.

    c keeps exp in range: the largest entry of W x̂ in a query's row; for keys, which have to share it, over all valid
    rows, (b, h, 1, 1). It is a constant for the gradient, as in performer-pytorch.
    """
    root = x.shape[-1] ** -0.25
    logits = x @ (projection * root).mT  # (b h n m)
    largest = logits.detach().amax(dim=-1, keepdim=True)  # (b h n 1)
    if not is_query:
        if mask is not None:
            largest = largest.masked_fill(~mask[:, None, :, None], -torch.inf)
        largest = largest.amax(dim=2, keepdim=True)  # (b h 1 1)
    shift = -largest - x.square().sum(dim=-1, keepdim=True) * (root**2 / 2)  # (b h n 1)
    if mask is not None:
        shift = shift.masked_fill(~mask[:, None, :, None], -torch.inf)
    # added, not subtracted: the backward of a subtraction would negate all (b h n m) of it
    return logits.add_(shift).exp_(), largest


def summarize_keys(
    key: Tensor, value: Tensor, projection: Tensor, mask: Tensor | None, epsilon: float, rows: int
) -> tuple[Tensor, Tensor]:
    """phi(K)ᵀ V (b, h, m, d) and phi(K)ᵀ 1 (b, h, m, 1), `rows` keys at a time.

    Each part has its own c and is brought to the largest of them at the end. performer-pytorch takes c over padding
    too, so that there an example's output depends on what it is padded with.
    """
    masks = [None] * -(-key.shape[2] // rows) if mask is None else mask.split(rows, dim=1)
    contexts, weights, largest = [], [], []
    for k, v, valid in zip(key.split(rows, dim=2), value.split(rows, dim=2), masks, strict=True):
        features, c = random_features(k, projection, is_query=False, mask=valid)
        contexts.append(features.mT @ v)
        weights.append(features.sum(dim=2).unsqueeze(-1))
        largest.append(c)
    # without a valid key every c is -inf, and -inf - -inf is not a number
    common = torch.stack(largest).amax(dim=0).clamp(min=torch.finfo(key.dtype).min)
    shares = [(c - common).exp() for c in largest]
    context, weight = contexts[0] * shares[0], weights[0] * shares[0]
    for more, further, share in zip(contexts[1:], weights[1:], shares[1:], strict=True):
        context, weight = context + more * share, weight + further * share
    # epsilon is added to products instead of to features, which spares tensors of n m elements
    count = key.shape[2] if mask is None else mask.sum(dim=1).to(key.dtype).view(-1, 1, 1, 1)
    return context + epsilon * value.sum(dim=2, keepdim=True), weight + epsilon * count


def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    projection: Tensor,
    epsilon: float = EPSILON,
) -> Tensor:
    """phi(Q) (phi(K)ᵀ V) / (phi(Q) Σ phi(K)) for self-attention on (b, h, n, d), `mask` (b, n) True for real tokens.

    phi(x) = exp(W x̂ - |x̂|² / 2 - c) + epsilon with `projection` W (m, d) and x̂ = x d^(-1/4). With epsilon = 0 the
    mean of phi(q) . phi(k) over W is proportional to exp(q . k / √d). The published factor 1 / √m cancels.

    >>> x = torch.randn(2, 4, 1000, 8)
    >>> performer_attention(x, x, x, projection=draw_projection(32, 8)).shape
    torch.Size([2, 4, 1000, 8])
    """
    check_self_attention(query, key, value, mask)
    check_floating("projection", projection)
    if projection.dim() != 2 or projection.shape[1] != query.shape[3]:
        raise ValueError(
            f"projection has shape {shape_of(projection)}: must be (features, {query.shape[3]}), as from "
            f"draw_projection(features, {query.shape[3]})."
        )
    check_number("epsilon", epsilon, minimum=0)
    # exponentials and sums over the whole sequence: never in half precision
    dtype = at_least_float32(value.dtype)
    rows = max(SMALLEST_BLOCK, BLOCK_ELEMENTS // max(query.shape[0] * query.shape[1] * projection.shape[0], 1))
    with full_precision(value):
        q, k, v = (zero_masked(x, mask).to(dtype) for x in (query, key, value))
        projection = projection.to(dtype)
        context, weight = summarize_keys(k, v, projection, mask, epsilon, rows)
        context_rest, weight_rest = (epsilon * x.sum(dim=2, keepdim=True) for x in (context, weight))
        outs = []
        for block in q.split(rows, dim=2):
            features, _ = random_features(block, projection, is_query=True)  # (b h rows m)
            normalizer = (features @ weight + weight_rest).clamp(min=SMALLEST_NORMALIZER)
            outs.append((features @ context + context_rest) / normalizer)
        out = torch.cat(outs, dim=2)
    return zero_masked(out.to(value.dtype), mask)


class PerformerAttention(Attention):
    """`redraw`: a new projection for each training forward; without it one is kept. It is saved in the state dict."""

    name = "performer"
    operation = staticmethod(performer_attention)
    stochastic = True
    size_option = "num_features"

    def __init__(
        self, num_heads: int, head_dim: int, max_length: Length = None, *, num_features: int = 256, redraw: bool = False
    ) -> None:
        super().__init__(num_heads, head_dim, max_length)
        check_at_least("num_features", num_features, 1, "the paper uses 256")
        self.num_features, self.redraw = num_features, redraw
        self.register_buffer("projection", draw_projection(num_features, head_dim))

    def new_buffers(self) -> dict[str, Tensor]:
        new = draw_projection(self.num_features, self.head_dim, device=self.projection.device)
        return {"projection": new.to(self.projection.dtype)}

    def arguments(self, query: Tensor) -> dict[str, Any]:
        if self.redraw and self.training:
            # a new tensor rather than new content: an earlier forward may still need the old one for its backward
            self.projection = self.new_buffers()["projection"]
        return {"projection": self.projection}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_features={self.num_features}, redraw={self.redraw}"
