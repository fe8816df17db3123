"""The classical Nyström method on the softmax matrix, for studies and figures. Needs the whole n×n matrix."""

import torch
from torch import Tensor

from nystromformer.attention.checks import check_at_least, check_query_key_value


def sampled_softmax_approximation(
    query: Tensor, key: Tensor, num_samples: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Approximate S = softmax(Q Kᵀ/√d) from m of its own columns and rows; returns (Ŝ, S), both (b, h, n, s).

    This is the paper's section "Nyström method for matrix approximation" (eq. 2 to 6): Ŝ = S[:, J] (S[I, J])⁺ S[I, :],
    with I and J evenly spaced. It is exact on the sampled rows and columns where S[I, J] is invertible. A softmax row
    is normalised over all its entries, so sampling columns needs the full matrix first: O(n·s) time and memory, which
    is what `nystrom_attention` avoids by choosing landmarks before the softmax.

    >>> x = torch.randn(1, 1, 20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> approximation, softmax = sampled_softmax_approximation(x, x, num_samples=20)
    >>> torch.allclose(approximation, softmax)
    True
    """
    check_query_key_value(query, key)
    check_at_least("num_samples", num_samples, 1)
    longest = min(query.shape[2], key.shape[2])
    if num_samples > longest:
        raise ValueError(f"num_samples={num_samples}: must be at most {longest}, the smaller of n and s.")
    scale = query.shape[3] ** -0.5 if scale is None else scale
    S = torch.softmax(scale * query @ key.mT, dim=-1)
    rows = _evenly_spaced(query.shape[2], num_samples, query.device)
    columns = _evenly_spaced(key.shape[2], num_samples, key.device)
    core = S[:, :, rows][..., columns]  # A_S of the paper
    return S[..., columns] @ torch.linalg.pinv(core) @ S[:, :, rows], S


def _evenly_spaced(length: int, count: int, device: torch.device) -> Tensor:
    """`count` different positions, the middle of each of `count` equal segments."""
    return ((torch.arange(count, device=device) * 2 + 1) * length) // (2 * count)
