"""Performer: softmax attention through positive orthogonal random features, FAVOR+ (Choromanski et al., 2021)."""

import torch
from torch import Tensor

from nystromformer.attention.base import Attention
from nystromformer.attention.checks import check_at_least
from nystromformer.attention.masks import zero_padding

EPSILON = 1e-4
"""Added to every feature, as published, so that no query is left without weight."""
SMALLEST_NORMALISER = 1e-12
"""Only reached without valid keys, where the numerator is 0."""


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


def random_features(x: Tensor, projection: Tensor, is_query: bool, mask: Tensor | None) -> Tensor:
    """exp(W x̂ - |x̂|² / 2 - c) with x̂ = x d^(-1/4), without the epsilon: (b, h, n, features), 0 for masked keys.

    c keeps exp in range and, epsilon apart, cancels in the normalised result: the row's maximum for a query; for keys,
    which have to share it, the maximum over the valid keys of the same example and head. performer-pytorch takes the
    latter over padding too, so there an example's output depends on what it is padded with. Like there, c is a
    constant for the gradient.
    """
    root = x.shape[-1] ** -0.25
    logits = x @ (projection * root).mT  # (b h n m)
    largest = logits.detach().amax(dim=-1, keepdim=True)  # (b h n 1)
    if not is_query:
        if mask is not None:
            largest = largest.masked_fill(~mask[:, None, :, None], -torch.inf)
        largest = largest.amax(dim=2, keepdim=True)  # (b h 1 1)
    offset = largest + x.square().sum(dim=-1, keepdim=True) * (root**2 / 2)
    if mask is not None and not is_query:
        offset = offset.masked_fill(~mask[:, None, :, None], torch.inf)  # exp(-inf): no weight
    return logits.sub_(offset).exp_()


def performer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    mask: Tensor | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """phi(Q) (phi(K)ᵀ V) / (phi(Q) Σ phi(K)) for self-attention on (b, h, n, d), `mask` (b, n) True for real tokens.

    phi(x) = exp(W x̂ - |x̂|² / 2) + epsilon with `projection` W (features, d), so that E[phi(q) . phi(k)] is
    exp(q . k / √d) where epsilon = 0.

    >>> x = torch.randn(2, 4, 1000, 8)
    >>> performer_attention(x, x, x, draw_projection(32, 8)).shape
    torch.Size([2, 4, 1000, 8])
    """
    # exponentials and sums over the whole sequence: never in half precision
    dtype = torch.promote_types(value.dtype, torch.float32)
    with torch.autocast(value.device.type, enabled=False):
        q, k, v = (zero_padding(x, mask).to(dtype) for x in (query, key, value))
        projection = projection.to(dtype)
        q = random_features(q, projection, is_query=True, mask=mask)  # (b h n m)
        k = random_features(k, projection, is_query=False, mask=mask)  # (b h n m)
        # epsilon is added to the products instead of to the features, which spares two tensors of n m elements;
        # the published factor 1/√m of the features cancels
        count = k.new_tensor(k.shape[2]) if mask is None else mask.sum(dim=1).to(dtype).view(-1, 1, 1, 1)
        context = k.mT @ v + epsilon * v.sum(dim=2, keepdim=True)  # (b h m d)
        weight = k.sum(dim=2).unsqueeze(-1) + epsilon * count  # (b h m 1)
        numerator = q @ context + epsilon * context.sum(dim=2, keepdim=True)  # (b h n d)
        normaliser = q @ weight + epsilon * weight.sum(dim=2, keepdim=True)  # (b h n 1)
        out = numerator / normaliser.clamp(min=SMALLEST_NORMALISER)
    return zero_padding(out.to(value.dtype), mask)


class PerformerAttention(Attention):
    """`redraw`: a new projection for each training forward. Without it one projection, saved in the state dict, stays."""

    stochastic = True
    size_option = "num_features"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_length: int | None = None,
        *,
        num_features: int = 256,
        redraw: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, max_length)
        check_at_least("num_features", num_features, 1, "the paper uses 256")
        self.num_features, self.redraw = num_features, redraw
        self.register_buffer("projection", draw_projection(num_features, head_dim))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if self.redraw and self.training:
            # a new tensor rather than new content: an earlier forward may still need the old one for its backward
            new = draw_projection(self.num_features, self.head_dim, device=self.projection.device)
            self.projection = new.to(self.projection.dtype)
        return performer_attention(query, key, value, self.projection, mask)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_features={self.num_features}, redraw={self.redraw}"
