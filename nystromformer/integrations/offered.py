"""The attentions that fit into models made without them: which there are, their options, and the masks they are given.

Such an attention has nothing to train, costs linear time, takes the model's own scale, and the paper's convolution
where a model has been given one. Its class says so; nothing here goes by name.

Masks that were made for exact attention become one flag for each token. All that such flags can't say is refused: a
mask that is dropped, or read as another, would change results without a word.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nystromformer.attention import ATTENTIONS, Attention
from nystromformer.attention.registry import parse_attention_name
from nystromformer.attention.shared.common import all_valid, shape_of
from nystromformer.checks import did_you_mean

RECORD = "_replaced_attention"
"""Where a module, or a model around it, keeps what `replace_attention` gave it. No part of state dicts."""

OFFERED: dict[str, type[Attention]] = {
    name: attention for name, attention in ATTENTIONS.items() if attention.linear and attention.takes_convolution
}

CONVOLUTION_SIZE = "conv_kernel_size"
"""An option of the attentions as modules. In a model that was made without it the convolution is added explicitly."""

EXACT_BELOW = 256
"""The default of `exact_below` here. So many tokens are computed exactly, since an approximation of few saves no time;
the operations themselves, and our own models, approximate whatever has more tokens than landmarks."""

OPTIONS = {
    name: {option: default for option, default in attention.option_defaults().items() if option != CONVOLUTION_SIZE}
    | {"exact_below": EXACT_BELOW}
    for name, attention in OFFERED.items()
}
"""What can be set, and the defaults."""

LONGEST_MAP = 1024
"""The most tokens for which whole attention matrices are made."""

MASKED_FROM = -1e4
"""Additive masks hold 0 for real tokens and at most this for padding; weights of e^-10000 are 0 in any precision."""


@dataclass(frozen=True)
class Choice:
    """An attention and its options, ready to be called."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def attention(self) -> type[Attention]:
        return OFFERED[self.name]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        *,
        is_cross: bool = False,
        scale: float | None = None,
        conv_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """(b, h, n, e) from (b, h, n, d), (b, h, s, d), (b, h, s, e); masks are boolean (b, n) and (b, s)."""
        masks: dict[str, Tensor | None] = {"mask": key_mask}
        if is_cross or query.shape[2] != key.shape[2]:
            if not self.attention.cross_attention:
                raise ValueError(
                    f"{self.name} is for self-attention, where queries have neighbors among the keys, and this is "
                    f"cross-attention ({query.shape[2]} queries, {key.shape[2]} keys): use {one_of(crossing())} there."
                )
            if key_mask is not None or query_mask is not None:
                masks = {
                    "query_mask": all_valid(query) if query_mask is None else query_mask,
                    "key_mask": all_valid(key) if key_mask is None else key_mask,
                }
        options = {**OPTIONS[self.name], **self.options}
        return self.attention.operation(query, key, value, **masks, scale=scale, conv_weight=conv_weight, **options)

    def attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor,
        max_seqlen: int | None = None,
        *,
        scale: float | None = None,
        conv_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """(t, h, e) from (t, h, d), (t, h, d), (t, h, e) of packed sequences, with borders `cu_seqlens` (b + 1)."""
        given = {"max_seqlen": max_seqlen, "scale": scale, "conv_weight": conv_weight}
        operation = self.attention.packed_operation
        assert operation is not None  # those that are offered have one
        return operation(query, key, value, cu_seqlens, **given, **{**OPTIONS[self.name], **self.options})


@dataclass
class Replacement:
    """What was changed in one module."""

    name: str
    """Of the module, from where `replace_attention` was called."""
    choice: Choice | None = None
    """The attention that it has now; None in a model that only holds such modules."""
    before: dict[str, Any] = field(default_factory=dict)
    """Attributes as they were."""
    hook: RemovableHandle | None = None
    holders: list[nn.Module] = field(default_factory=list)
    """Models whose masks are made for this module, and so for others once it is restored."""


def replacement_of(module: nn.Module) -> Replacement | None:
    """What `replace_attention` gave a module, None if nothing."""
    return vars(module).get(RECORD)


def chosen(name: str, options: Mapping[str, Any]) -> Choice:
    """The attention of a name such as `nystrom-local-64` with `options`, all of them checked.

    >>> chosen("nystrom-32", {"pinv_iterations": 8})
    Choice(name='nystrom', options={'num_landmarks': 32, 'pinv_iterations': 8})
    >>> chosen("nystrom", {"pinv_iteration": 8})
    Traceback (most recent call last):
    ValueError: option 'pinv_iteration' of 'nystrom': must be one of ... Did you mean 'pinv_iterations'?
    """
    attention, sized = parse_attention_name(name)
    if attention.name not in OFFERED:
        raise ValueError(
            f"attention {name!r} can't be put into a model that was made without it, since it has parameters of its "
            f"own, another softmax or another cost: use {one_of(OFFERED)}."
        )
    for option in sized:
        if option in options:
            raise ValueError(f"attention {name!r} already sets {option}; leave out {option}={options[option]!r}.")
    check_option_names(attention.name, options)
    choice = Choice(attention.name, {**sized, **options})
    with torch.device("meta"):  # its constructor checks the values; nothing is allocated
        attention(1, 1, **choice.options, **{CONVOLUTION_SIZE: None})
    return choice


def check_option_names(name: str, options: Mapping[str, Any]) -> None:
    allowed = OPTIONS[name]
    for option in options:
        if option == CONVOLUTION_SIZE:
            raise ValueError(
                f"option {option!r} of {name!r}: the convolution has weights, so it is added to the model; call "
                f"nystromformer.add_skip_convolution(model, kernel_size={options[option]!r})."
            )
        if option not in allowed:
            raise ValueError(
                f"option {option!r} of {name!r}: must be one of {', '.join(allowed)}.{did_you_mean(option, allowed)}"
            )


def repeat_heads(name: str, grouped: Tensor, query: Tensor) -> Tensor:
    """Keys or values (b, g, s, d) that several query heads share, repeated to (b, h, s, d)."""
    groups, heads = grouped.shape[1], query.shape[1]
    if groups == heads:
        return grouped
    if heads % groups:
        raise ValueError(
            f"{name} has {groups} heads and query {heads}: the query's must be a multiple, so that groups share one."
        )
    return grouped.repeat_interleave(heads // groups, dim=1)


def attention_map(attend: Callable[..., Tensor], query: Tensor, key: Tensor) -> Tensor:
    """The matrix (b, h, n, s) that `attend` multiplies values with: its result for the identity in place of values."""
    batch, heads, length = key.shape[:3]
    if max(length, query.shape[2]) > LONGEST_MAP:
        raise ValueError(
            f"attention matrices of {length} tokens were asked for: at most {LONGEST_MAP}, since they grow with the "
            f"square of the length; leave them out (output_attentions=False, need_weights=False), and ask for single "
            f"rows with nystromformer.nystrom_attention_weights(query, key, rows=[0])."
        )
    identity = torch.eye(length, dtype=query.dtype, device=query.device).expand(batch, heads, length, length)
    return attend(query, key, identity)


def crossing() -> list[str]:
    return [name for name, attention in OFFERED.items() if attention.cross_attention]


def one_of(names: Mapping[str, Any] | list[str]) -> str:
    return " or ".join(repr(name) for name in names)


def token_mask(attention_mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """The boolean mask (b, s) over keys in whatever exact attention would have been given.

    That is (b, s), or (b, 1, 1, s) as models make it, or (b, h, n, s) where it is the same for all heads and queries;
    boolean or whole numbers with True for real tokens, or additive with 0 for them.

    >>> token_mask(torch.tensor([[[[0.0, -torch.inf]]]]), batch=1, length=2)
    tensor([[ True, False]])
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"the attention mask is a {type(attention_mask).__name__}: must be a torch.Tensor.")
    if attention_mask.dim() == 4:
        attention_mask = _one_row(attention_mask)
    if attention_mask.shape not in ((batch, length), (1, length)):
        raise ValueError(
            f"the attention mask has shape {shape_of(attention_mask)}: must be ({batch}, {length}) or ({batch}, 1, 1, "
            f"{length}), one flag for each token."
        )
    return as_boolean(attention_mask).expand(batch, length)


def as_boolean(mask: Tensor) -> Tensor:
    """A mask with True for real tokens, from one that may be additive."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return mask.bool()
    real = mask == 0
    if not bool((real | (mask <= MASKED_FROM)).all()):
        raise ValueError(
            f"the attention mask has entries between {MASKED_FROM:g} and 0 or above: must be 0 for real tokens and "
            f"-inf for padding, because a bias on the logits has no place in attention of linear cost."
        )
    return real


def _one_row(mask: Tensor) -> Tensor:
    """(b, s) of a mask (b, h, n, s) that is the same for all heads and queries."""
    for axis in (1, 2):
        if mask.shape[axis] == 1 or mask.stride(axis) == 0:
            continue
        if torch.compiler.is_compiling() or not bool((mask == mask.narrow(axis, 0, 1)).all()):
            raise ValueError(
                f"the attention mask has shape {shape_of(mask)}, one entry for each pair of tokens: must be padding, "
                f"as (batch, length) or (batch, 1, 1, length), because attention of linear cost has no place for pairs."
            )
    return mask[:, 0, 0]
