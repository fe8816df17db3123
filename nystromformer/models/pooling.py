"""One vector for a sequence."""

import torch
from torch import Tensor, nn


def pool(hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """The first real token ("cls") or the mean of the real tokens ("mean") of `hidden` (b, n, d): (b, d).

    >>> hidden, mask = torch.tensor([[[9.0], [1.0], [3.0]]]), torch.tensor([[False, True, True]])
    >>> pool(hidden, mask, "cls"), pool(hidden, mask, "mean")
    (tensor([[1.]]), tensor([[2.]]))
    """
    if mask is None:
        return hidden[:, 0] if pooling == "cls" else hidden.mean(dim=1)
    if pooling == "cls":
        first = mask.long().argmax(dim=1)  # not simply 0: padding may stand on the left
        return hidden.gather(1, first[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
    total = torch.where(mask[..., None], hidden, torch.zeros((), dtype=hidden.dtype, device=hidden.device)).sum(dim=1)
    return total / mask.sum(dim=1, keepdim=True).clamp(min=1)


class NystromformerPooler(nn.Module):
    """A dense layer and tanh on the pooled vector, as in BERT."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, pooled: Tensor) -> Tensor:
        return torch.tanh(self.dense(pooled))
