"""Landmarks that are tokens, chosen one after the other as far as can be from those before.

So landmarks lie in all places where tokens are, and single tokens that differ from all others are among them, as
attention sinks do: Fast Nyström Attention (2025) uses such landmarks in pretrained models.
"""

import torch
from torch import Tensor

from nystromformer.attention.common import at_least_float32
from nystromformer.attention.landmarks import Segments, means_over


def farthest_tokens(
    tokens: Tensor, segments: Segments, mask: Tensor | None = None, liked_by: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Landmarks (b, h, m, d) of `tokens` (b, h, n, d), at least in float32, and which are no repetition, (b, h, m).

    The first is the key that the queries `liked_by` (b, h, n', d) like most on average, the sink of a head; without
    them the token farthest from the mean. Padding must be zero already. The choice has no gradient, the tokens have.
    Examples with at most m valid tokens keep one token per landmark, in their order.

    >>> from nystromformer.attention.landmarks import segments
    >>> tokens = torch.tensor([0.0, 1.0, 5.0, 5.1]).view(1, 1, 4, 1)
    >>> farthest_tokens(tokens, segments(tokens, 2))[0].flatten()
    tensor([0.0000, 5.1000])
    """
    batch, heads = tokens.shape[:2]
    points = tokens.to(at_least_float32(tokens.dtype))
    index, new = _farthest(points.detach(), segments, mask, liked_by)
    few = segments.one_token_each[:, None, None]
    chosen = torch.where(few[..., None], means_over(points, segments), points.take_along_dim(index[..., None], dim=2))
    return chosen, torch.where(few, segments.occupied[:, None].expand(batch, heads, -1), new)


@torch.no_grad()
def _farthest(
    points: Tensor, segments: Segments, mask: Tensor | None, liked_by: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Places (b, h, m), and whether each differs from those before it."""
    absent = None if mask is None else ~mask[:, None]  # (b 1 n)

    def best(score: Tensor) -> tuple[Tensor, Tensor]:
        return (score if absent is None else score.masked_fill(absent, -torch.inf)).max(dim=2)

    if liked_by is None:
        mean = points.sum(2, keepdim=True) / segments.valid.clamp(min=1)[:, None, None, None]
        _, place = best((points - mean).square().sum(-1))
    else:
        _, place = best((points @ liked_by.to(points.dtype).sum(2)[..., None])[..., 0])
    places, distances = [place], [torch.ones_like(place, dtype=points.dtype)]
    nearest = torch.full(points.shape[:3], torch.inf, dtype=points.dtype, device=points.device)
    for _ in range(segments.num_segments - 1):
        last = points.take_along_dim(place[..., None, None], dim=2)  # (b h 1 d)
        nearest = torch.minimum(nearest, (points - last).square().sum(-1))
        distance, place = best(nearest)
        places.append(place)
        distances.append(distance)
    return torch.stack(places, dim=2), torch.stack(distances, dim=2) > 0
