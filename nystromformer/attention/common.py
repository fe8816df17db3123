"""What all attentions share: checks of tensors, masks over tokens, precision.

Masks are boolean (b, n), True for a real token.
"""

import torch
from torch import Tensor
from torch.nn import functional

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def shape_of(tensor: Tensor) -> str:
    return "(" + ", ".join(str(size) for size in tensor.shape) + ")"


def check_query_key_value(query: Tensor, key: Tensor, value: Tensor | None = None) -> None:
    """(b, h, n, d), (b, h, s, d) and (b, h, s, e) of one floating dtype on one device, with n, s >= 1."""
    tensors = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: must be a torch.Tensor.")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} has shape {shape_of(tensor)}: must have 4 dimensions (batch, heads, length, head size); "
                f"split the heads with x.view(b, n, h, d).transpose(1, 2)."
            )
        if tensor.dtype not in FLOATING:
            raise TypeError(
                f"{name} has dtype {tensor.dtype}: must be float16, bfloat16, float32 or float64; convert with .to()."
            )
        if tensor.shape[2] < 1 or tensor.shape[3] < 1:
            raise ValueError(f"{name} has shape {shape_of(tensor)}: length and head size must be at least 1.")
    for name, tensor in tensors.items():
        if tensor.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"{name} has {tensor.shape[0]} examples and {tensor.shape[1]} heads, query has {query.shape[0]} and "
                f"{query.shape[1]}: they must agree; repeat grouped keys and values over their query heads first."
            )
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, query is {query.dtype}: must be equal; convert one with .to().")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device}, query on {query.device}: must be on one device.")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key has head size {key.shape[3]}, query has {query.shape[3]}: must be equal.")
    if value is not None and value.shape[2] != key.shape[2]:
        raise ValueError(f"value has length {value.shape[2]}, key has {key.shape[2]}: must be equal.")


def check_mask(name: str, mask: Tensor | None, tokens: Tensor) -> None:
    """`mask` must be None or boolean (b, n), for `tokens` of shape (b, h, n, d) or (b, n, d)."""
    if mask is None:
        return
    batch, length = tokens.shape[0], tokens.shape[-2]
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is a {type(mask).__name__}: must be a boolean torch.Tensor ({batch}, {length}).")
    if mask.dtype != torch.bool:
        raise TypeError(
            f"{name} has dtype {mask.dtype}: must be torch.bool with True for real tokens; "
            f"convert a 0/1 mask with mask.bool() and an additive one with mask == 0."
        )
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] != length:
        raise ValueError(
            f"{name} has shape {shape_of(mask)}: must be ({batch}, {length}), one flag for each token; "
            f"masks over pairs of tokens (causal ones among them) do not fit attention of linear cost."
        )
    if mask.device != tokens.device:
        raise ValueError(f"{name} is on {mask.device}, the tokens on {tokens.device}: must be on one device.")


def zero_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` (b, h, n, d) with its masked rows set to exactly 0, whatever they held, NaN and infinity included.

    >>> zero_masked(torch.tensor([[[[1.0], [float("nan")]]]]), torch.tensor([[True, False]])).flatten()
    tensor([1., 0.])
    """
    if mask is None:
        return x
    return torch.where(mask[:, None, :, None], x, torch.zeros((), dtype=x.dtype, device=x.device))


def key_padding_mask(mask: Tensor | None) -> Tensor | None:
    """The mask over keys to hand to a softmax: (b, 1, 1, s), with everything allowed where no key is valid.

    A softmax over nothing is 0/0. Where an example has no valid key its values are all zero (`zero_masked`), so
    attending to all of them gives the right answer, 0, and finite gradients.
    """
    if mask is None:
        return None
    return (mask | ~mask.any(dim=1, keepdim=True))[:, None, None, :]


def pad_head_dims(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three as fused kernels take them: zeros fill the narrower ones up, and no head is scattered in memory."""
    missing = query.shape[3] - value.shape[3]
    if missing > 0:
        value = functional.pad(value, (0, missing))
    elif missing < 0:
        query, key = functional.pad(query, (0, -missing)), functional.pad(key, (0, -missing))
    query, key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key, value))
    return query, key, value


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def full_precision(x: Tensor) -> torch.autocast:
    """A context without autocast, which would turn float32 products into half precision ones."""
    return torch.autocast(x.device.type, enabled=False)
