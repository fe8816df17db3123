"""`build_attention`: every attention by the name that the paper's tables use."""

import re
from typing import Any

from nystromformer.attention.agent import AgentAttention
from nystromformer.attention.base import Attention
from nystromformer.attention.linear import LinearAttention
from nystromformer.attention.linformer import LinformerAttention
from nystromformer.attention.longformer import LongformerAttention
from nystromformer.attention.nystrom.operation import NystromSelfAttention
from nystromformer.attention.nystrom_local.operation import NystromLocalAttention
from nystromformer.attention.performer import PerformerAttention
from nystromformer.attention.reformer import ReformerAttention
from nystromformer.attention.standard import StandardAttention
from nystromformer.checks import did_you_mean

ATTENTIONS: dict[str, type[Attention]] = {
    attention.name: attention
    for attention in (
        StandardAttention,
        NystromSelfAttention,
        NystromLocalAttention,
        LinformerAttention,
        LongformerAttention,
        ReformerAttention,
        PerformerAttention,
        LinearAttention,
        AgentAttention,
    )
}


LONGEST_NUMBER = 7
"""Digits of the number in a name."""


def parse_attention_name(name: str) -> tuple[type[Attention], dict[str, int]]:
    """Split a name such as `nystrom-64` into its class and the option that the suffix sets.

    >>> parse_attention_name("standard")
    (<class 'nystromformer.attention.standard.StandardAttention'>, {})
    """
    if not isinstance(name, str):
        raise TypeError(f"attention name {name!r} is a {type(name).__name__}: must be one of {', '.join(ATTENTIONS)}.")
    base, size = name, None
    if name not in ATTENTIONS and (match := re.fullmatch(r"(.+)-(\d+)", name)):
        if len(match[2]) > LONGEST_NUMBER:
            raise ValueError(f"attention {name[:60]!r}: its number must have at most {LONGEST_NUMBER} digits.")
        base, size = match[1], int(match[2])
    if base not in ATTENTIONS:
        raise ValueError(f"attention {name!r}: must be one of {', '.join(ATTENTIONS)}.{did_you_mean(base, ATTENTIONS)}")
    attention = ATTENTIONS[base]
    if size is None:
        return attention, {}
    if attention.size_option is None:
        raise ValueError(f"attention {name!r}: {base!r} takes no number; use {base!r}.")
    return attention, {attention.size_option: size}


def build_attention(
    name: str, *, num_heads: int, head_dim: int, max_length: int | None = None, **options: Any
) -> Attention:
    """Build an attention by name, with a suffix as in the paper (`nystrom-64`, `linformer-256`) or keyword options.

    The result maps `(query, key, value, mask=None)` of shape (b, h, n, d) to (b, h, n, d). What it can do is
    declared on its class (`Attention`).

    >>> import torch
    >>> attention = build_attention("standard", num_heads=2, head_dim=8)
    >>> x = torch.randn(1, 2, 100, 8)
    >>> attention(x, x, x).shape
    torch.Size([1, 2, 100, 8])
    """
    attention, sized = parse_attention_name(name)
    allowed = attention.option_defaults()
    for option in options:
        if option not in allowed:
            raise ValueError(
                f"option {option!r} of attention {name!r}: must be one of {', '.join(allowed) or '(none)'}."
                f"{did_you_mean(option, allowed)}"
            )
        if option in sized:
            raise ValueError(f"attention {name!r} already sets {option}; leave out {option}={options[option]!r}.")
    return attention(num_heads, head_dim, max_length, **sized, **options)
