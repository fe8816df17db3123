"""What all attentions share: checks of tensors, masks over tokens, precision, and `exact_below`.

Masks are boolean (b, n), True for a real token. Checks that need no tensor are in `nystromformer.checks`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from nystromformer.attention.native import MOST_COLUMNS, runs_native, thin_attention
from nystromformer.checks import check_at_least, check_number

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def shape_of(tensor: Tensor) -> str:
    return "(" + ", ".join(str(size) for size in tensor.shape) + ")"


def check_tokens(name: str, tensor: Tensor) -> None:
    """`tensor` must be floating (b, h, n, d) with n, d >= 1."""
    check_floating(name, tensor)
    if tensor.dim() != 4:
        raise ValueError(
            f"{name} has shape {shape_of(tensor)}: must have 4 dimensions (batch, heads, length, head size); "
            f"split the heads with x.view(b, n, h, d).transpose(1, 2)."
        )
    if tensor.shape[2] < 1 or tensor.shape[3] < 1:
        raise ValueError(f"{name} has shape {shape_of(tensor)}: length and head size must be at least 1.")


def check_floating(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}: must be a torch.Tensor.")
    if tensor.dtype not in FLOATING:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}: must be float16, bfloat16, float32 or float64; convert with .to()."
        )


def check_query_key_value(query: Tensor, key: Tensor, value: Tensor | None = None) -> None:
    """(b, h, n, d), (b, h, s, d) and (b, h, s, e) of one floating dtype on one device, with n, s >= 1."""
    tensors = {"query": query, "key": key} | ({} if value is None else {"value": value})
    for name, tensor in tensors.items():
        check_tokens(name, tensor)
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


def check_self_attention(query: Tensor, key: Tensor, value: Tensor | None, mask: Tensor | None) -> None:
    """Queries, keys and values of one sequence, and its mask."""
    check_query_key_value(query, key, value)
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{query.shape[2]} queries and {key.shape[2]} keys: must be as many, of one sequence; use "
            f"nystrom_attention or standard_attention for cross-attention."
        )
    check_mask("mask", mask, query)


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


def checked_masks(
    query: Tensor, key: Tensor, mask: Tensor | None, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The masks of queries and of keys, from what a caller gave: `mask` for one sequence, or one for each of two.

    One mask for as many queries as keys could mean either: it is refused, since queries at padding would otherwise
    count as real ones.
    """
    overrides = {"query_mask": query_mask, "key_mask": key_mask}
    given = [name for name, each in overrides.items() if each is not None]
    if mask is not None:
        if given:
            raise ValueError(
                f"{given[0]} was given beside mask: mask is for both sequences of self-attention; give mask alone, or "
                f"query_mask and key_mask for cross-attention."
            )
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"mask was given with {query.shape[2]} queries and {key.shape[2]} keys: mask is for self-attention; "
                f"give query_mask (b, n) and key_mask (b, s)."
            )
        check_mask("mask", mask, query)
        return mask, mask
    check_mask("query_mask", query_mask, query)
    check_mask("key_mask", key_mask, key)
    if len(given) == 1 and query.shape[2] == key.shape[2]:
        raise ValueError(
            f"{given[0]} was given alone, with as many queries as keys: for self-attention give mask=, which is for "
            f"both; for cross-attention give query_mask and key_mask, one of them all True where nothing is masked."
        )
    return query_mask, key_mask


def checked_scale(scale: float | None, query: Tensor) -> float:
    if scale is None:
        return query.shape[3] ** -0.5
    check_number("scale", scale, hint="None means d ** -0.5")
    return float(scale)


def checked_rows(rows: Sequence[int] | Tensor, query: Tensor) -> Tensor:
    """`rows` as a tensor of indices into the queries; negative ones count from the end."""
    length = query.shape[2]
    index = torch.as_tensor(rows, device=query.device)
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool or index.numel() == 0:
        raise TypeError(f"rows={rows!r}: must be a list of one or more whole numbers, as rows=[0].")
    if not index.is_meta and bool(((index < -length) | (index >= length)).any()):
        raise ValueError(f"rows={rows!r}: must lie between {-length} and {length - 1}, for {length} queries.")
    return index % length


def refuse_causal(is_causal: bool) -> None:
    if is_causal:
        raise ValueError(
            "is_causal=True: must be False, because landmarks average over later tokens; for causal attention use "
            "torch.nn.functional.scaled_dot_product_attention(..., is_causal=True)."
        )


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """Refuse tensors with a tangent: neither PyTorch's fused kernels nor our own functions have such a derivative."""
    if torch.compiler.is_compiling():  # in a graph the kernels themselves refuse
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "forward-mode differentiation (torch.func.jvp, jacfwd, autograd.forward_ad) was asked for: must be reverse "
            "mode, since fused attention has no forward derivative; use torch.func.vjp, jacrev or backward()."
        )


def is_readable(x: Tensor) -> bool:
    """Whether Python can look at what `x` holds without waiting for a device: not in graphs or under `torch.func`."""
    in_python = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    return in_python and x.device.type == "cpu" and type(x) is Tensor


def zero_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` (b, h, n, d) with its masked rows set to exactly 0, whatever they held, NaN and infinity included.

    >>> zero_masked(torch.tensor([[[[1.0], [float("nan")]]]]), torch.tensor([[True, False]])).flatten()
    tensor([1., 0.])
    """
    if mask is None:
        return x
    return torch.where(mask[:, None, :, None], x, torch.zeros((), dtype=x.dtype, device=x.device))


def all_valid(tokens: Tensor) -> Tensor:
    """A mask (b, n) that leaves nothing out, for `tokens` of shape (b, h, n, d) or (b, n, d)."""
    return torch.ones(tokens.shape[0], tokens.shape[-2], dtype=torch.bool, device=tokens.device)


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


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """`scaled_dot_product_attention` without a matrix of queries by keys, which its fallback makes.

    Where queries or keys are few, machine code of our own computes it (`native`). The fused kernels need equal widths.
    """
    width, differ = value.shape[3], query.shape[3] != value.shape[3]
    if min(query.shape[2], key.shape[2]) <= MOST_COLUMNS and _one_row(allowed) and runs_native(query, key, value):
        bias = None if allowed is None else additive(allowed, query.dtype)
        return thin_attention(query, key, value, bias, scale, with_lse=False)[0]
    query, key, value = pad_head_dims(query, key, value)
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale)
    return out[..., :width] if differ else out


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as what is added to logits, which a mask can be already."""
    if allowed.dtype != torch.bool:
        return allowed.to(dtype)
    return torch.zeros((), dtype=dtype, device=allowed.device).masked_fill(~allowed, -torch.inf)


def _one_row(allowed: Tensor | None) -> bool:
    """Whether a mask is the same for all queries, and takes no gradient."""
    return allowed is None or (allowed.dim() == 4 and allowed.shape[2] == 1 and not allowed.requires_grad)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """A context without autocast, which would turn float32 products into half precision ones."""
    # autocast does not know meta tensors, which have shapes and no numbers; to leave it costs more than to ask for it
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def rows_of_map(
    operation: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    rows: Sequence[int] | Tensor,
    mask: Tensor | None,
    **arguments: Any,
) -> Tensor:
    """Rows (b, h, r, n) of the matrix that `operation` multiplies values with, without gradients.

    That matrix is the gradient of the outputs by the values. With values of width r, of which each column serves one
    row, a single backward gives all rows, in the memory of values of that width. `arguments` are the operation's.
    """
    check_self_attention(query, key, None, mask)
    with torch.inference_mode(False), torch.enable_grad():
        rows = checked_rows(rows, query)
        query, key = (x.clone() if x.is_inference() else x.detach() for x in (query, key))
        mask = mask if mask is None else mask.clone()
        value = query.new_zeros(*key.shape[:3], rows.shape[0]).requires_grad_()
        asked = operation(query, key, value, mask, **arguments)[:, :, rows].diagonal(dim1=2, dim2=3).sum()
        (weights,) = torch.autograd.grad(asked, value)
    return weights.mT


def check_exact_below(given: int | None) -> None:
    if given is not None:
        check_at_least("exact_below", given, 1, "None leaves it to the attention itself")


def all_are_short(query: Tensor, key: Tensor, exact_below: int | None) -> bool:
    """Whether every example surely is exact, by the lengths (b, h, n, d) and (b, h, s, d) alone."""
    return exact_below is not None and query.shape[2] <= exact_below and key.shape[2] <= exact_below


def exact_where_short(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, query_mask: Tensor | None, key_mask: Tensor | None,
    scale: float, exact_below: int | None,
) -> Tensor:  # fmt: skip
    """`out` (b, h, n, e) with the rows of short examples replaced by exact ones. Masked rows must be zero already.

    An approximation of few tokens saves nothing. So examples with at most `exact_below` valid tokens, queries and keys
    alike, can be computed exactly: their tokens are moved to the front, attended to among so many places, and moved
    back. Every example goes through both ways, and a flag for each chooses. So nothing has a shape that depends on what
    the masks hold, and the whole can be compiled, exported and mapped.
    """
    if exact_below is None or not _some_may_be_short(query, key, query_mask, key_mask, exact_below):
        return out
    queries = _Front(query, query_mask, exact_below)
    keys = queries if key_mask is query_mask and key_mask is not None else _Front(key, key_mask, exact_below)
    exact = softmax_attention(
        queries.gather(query), keys.gather(key), keys.gather(value), key_padding_mask(keys.present), scale
    )
    short = (queries.valid <= exact_below) & (keys.valid <= exact_below)
    return torch.where(short[:, None, None, None], queries.scatter(exact), out)


def exact_if_short(
    approximate: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float,
    exact_up_to: int,
) -> Tensor:  # fmt: skip
    """`approximate(query, key, value, mask)` of examples with more valid tokens than that, exact attention of others.

    For masks that Python can read: no example goes through both ways, as it does in `exact_where_short`.
    """
    inputs = query, key, value, mask
    short = mask.sum(dim=1) <= exact_up_to
    if not short.any():
        return approximate(*inputs)
    if short.all():
        return _exact_at_the_front(scale, *inputs)
    outs = approximate(*(x[~short] for x in inputs)), _exact_at_the_front(scale, *(x[short] for x in inputs))
    return torch.cat(outs).index_select(0, short.int().argsort(stable=True).argsort())


def _exact_at_the_front(scale: float, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Exact attention (b, h, n, e) among as many places as an example has valid tokens at most."""
    front = _Front(query, mask, max(1, int(mask.sum(dim=1).max())))
    query, key, value = (front.gather(zero_masked(x, mask)) for x in (query, key, value))
    return front.scatter(softmax_attention(query, key, value, key_padding_mask(front.present), scale))


def short_examples(
    query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, exact_below: int | None
) -> Tensor:
    """Which examples are short: (b,)."""
    if exact_below is None:
        return torch.zeros(query.shape[0], dtype=torch.bool, device=query.device)
    counts = (
        (all_valid(tokens) if mask is None else mask).sum(dim=1)
        for tokens, mask in ((query, query_mask), (key, key_mask))
    )
    return torch.stack([count <= exact_below for count in counts]).all(dim=0)


def _some_may_be_short(
    query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, exact_below: int
) -> bool:
    if torch.compiler.is_exporting():  # one graph for all lengths: no decision may rest on a length
        return True
    return all(
        mask is not None or tokens.shape[2] <= exact_below for tokens, mask in ((query, query_mask), (key, key_mask))
    )


class _Front:
    """The first `places` valid tokens of each example, moved to the front."""

    def __init__(self, tokens: Tensor, mask: Tensor | None, places: int) -> None:
        mask = all_valid(tokens) if mask is None else mask
        batch, length = mask.shape
        rank = mask.long().cumsum(dim=1) - 1
        # Padding and tokens beyond the places all go to one place more, which is cut off again.
        target = torch.where(mask & (rank < places), rank, places)
        source = torch.arange(length, device=mask.device).expand(batch, length)
        self.source = source.new_zeros(batch, places + 1).scatter(1, target, source)[:, :-1]  # (b e)
        self.place = rank.clamp(0, places - 1)  # (b n)
        self.valid = mask.sum(dim=1)
        self.present = torch.arange(places, device=mask.device) < self.valid[:, None]  # (b e)

    def gather(self, x: Tensor) -> Tensor:
        """(b, h, n, d) → (b, h, places, d), 0 where there is no token."""
        moved = x.gather(2, self.source[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
        return moved.masked_fill(~self.present[:, None, :, None], 0)

    def scatter(self, x: Tensor) -> Tensor:
        """(b, h, places, d) → (b, h, n, d), each token back in its place; what stands elsewhere has no meaning."""
        return x.gather(2, self.place[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
