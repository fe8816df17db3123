"""Checks of what users pass in. Every message says what was given, what is allowed and what to do."""

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def shape_of(tensor: Tensor) -> str:
    return "(" + ", ".join(str(size) for size in tensor.shape) + ")"


def nearest(given: str, choices: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` for the closest choice, or nothing when none is close.

    >>> nearest("nystrm", ["nystrom", "linear"])
    " Did you mean 'nystrom'?"
    """
    matches = difflib.get_close_matches(str(given).lower(), list(choices), n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def check_choice(name: str, given: object, choices: Iterable[str]) -> None:
    choices = list(choices)
    if given not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={given!r}: must be one of {allowed}.{nearest(str(given), choices)}")


def check_at_least(name: str, given: object, minimum: int, hint: str = "") -> None:
    """`given` must be a whole number of at least `minimum`."""
    if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)):
        raise TypeError(f"{name}={given!r} is a {type(given).__name__}: must be a whole number of at least {minimum}.")
    if given < minimum:
        raise ValueError(f"{name}={given}: must be at least {minimum}{'; ' + hint if hint else ''}.")


def check_fraction(name: str, given: object) -> None:
    """`given` must be a probability below one, as for dropout."""
    if isinstance(given, bool) or not isinstance(given, (int, float)):
        raise TypeError(f"{name}={given!r} is a {type(given).__name__}: must be a number with 0 <= {name} < 1.")
    if not 0 <= given < 1:
        raise ValueError(f"{name}={given}: must be at least 0 and below 1.")


def check_odd(name: str, given: object) -> None:
    check_at_least(name, given, 1)
    if given % 2 == 0:
        raise ValueError(f"{name}={given}: must be odd, so that it has a centre; use {given - 1} or {given + 1}.")


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
