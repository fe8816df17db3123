"""Dense float64 evaluations, written straight from the paper, one example and one head at a time."""

import torch
from torch import Tensor


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Eq. 1: softmax(Q Kᵀ/√d) V for (n, d), (s, d), (s, e)."""
    return torch.softmax(query @ key.T / query.shape[1] ** 0.5, dim=1) @ value


def segment_matrix(length: int, m: int) -> Tensor:
    """(m, n): row j averages the tokens i with ⌊i·m/n⌋ = j."""
    rows = torch.zeros(m, length, dtype=torch.float64)
    for i in range(length):
        rows[i * m // length, i] = 1
    return rows / rows.sum(1, keepdim=True)


def newton_pinv(A: Tensor, iterations: int) -> Tensor:
    """Lemma 1, with Z₀ = Aᵀ / (‖A‖₁ ‖A‖∞)."""
    eye = torch.eye(len(A), dtype=A.dtype)
    Z = A.T / (A.abs().sum(0).max() * A.abs().sum(1).max())
    for _ in range(iterations):
        Z = Z @ (13 * eye - A @ Z @ (15 * eye - A @ Z @ (7 * eye - A @ Z))) / 4
    return Z


def nystrom_head(query: Tensor, key: Tensor, value: Tensor, m: int, iterations: int = 6) -> Tensor:
    """Eq. 15 for one head of valid tokens only: (n, d), (s, d), (s, e); exact attention with at most m of either."""
    if len(query) <= m or len(key) <= m:
        return softmax_attention(query, key, value)
    scale = query.shape[1] ** -0.5
    query_landmarks = segment_matrix(len(query), m) @ query
    key_landmarks = segment_matrix(len(key), m) @ key
    F = torch.softmax(scale * query @ key_landmarks.T, dim=1)
    A = torch.softmax(scale * query_landmarks @ key_landmarks.T, dim=1)
    B = torch.softmax(scale * query_landmarks @ key.T, dim=1)
    return F @ newton_pinv(A, iterations) @ B @ value


def convolved(value: Tensor, kernel: Tensor) -> Tensor:
    """Convolution of (n, e) with (k,) as a dense banded matrix, zeros beyond the ends."""
    length, half = len(value), len(kernel) // 2
    band = torch.zeros(length, length, dtype=value.dtype)
    for i in range(length):
        for j in range(len(kernel)):
            if 0 <= i + j - half < length:
                band[i, i + j - half] = kernel[j]
    return band @ value


def nystrom(query, key, value, m, query_mask=None, key_mask=None, kernel=None, iterations=6) -> Tensor:
    """The whole contract on (b, h, n, d): each example's valid tokens alone, then put back among zeros."""
    batch, heads, length, _ = query.shape
    out = torch.zeros(batch, heads, length, value.shape[3], dtype=torch.float64)
    query, key, value = query.double(), key.double(), value.double()
    for b in range(batch):
        rows = torch.ones(length, dtype=torch.bool) if query_mask is None else query_mask[b]
        columns = torch.ones(key.shape[2], dtype=torch.bool) if key_mask is None else key_mask[b]
        for h in range(heads):
            if rows.any() and columns.any():
                out[b, h, rows] = nystrom_head(
                    query[b, h, rows], key[b, h, columns], value[b, h, columns], m, iterations
                )
            if kernel is not None:
                present = torch.where(columns[:, None], value[b, h], 0)
                out[b, h, rows] += convolved(present, kernel[h].double())[rows]
    return out
