"""`use_attention`: calls of PyTorch's exact attention inside a `with` block are served by attention of linear cost.

Two functions are redirected, `scaled_dot_product_attention` and what `nn.MultiheadAttention` calls. While a mode of
torch functions is active, PyTorch's modules leave their fused fast paths by themselves.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from nystromformer.integrations.offered import Choice, as_boolean, attention_map, chosen, repeat_heads, token_mask


@contextmanager
def use_attention(name: str, *, self_attention: bool = False, **options: Any) -> Iterator[None]:
    """Inside, calls of `torch.nn.functional.scaled_dot_product_attention` and `nn.MultiheadAttention` use `name`.

    Causal calls, masks over pairs of tokens, biases and dropout on weights are refused. With gradient checkpointing the
    backward computes again what the forward did, perhaps outside the block: use `replace_attention` there.

    Args:
        name: as for `replace_attention`.
        self_attention: says that all calls with as many queries as keys are self-attention. A padding mask says which
            keys are real; only in self-attention it holds for the queries, too, so such calls are refused without it.
        options: of the attention, such as `pinv_iterations=8`.

    >>> import torch
    >>> x = torch.randn(1, 2, 1000, 8)
    >>> with use_attention("nystrom-32"):
    ...     out = functional.scaled_dot_product_attention(x, x, x)
    >>> from nystromformer import nystrom_attention
    >>> torch.equal(out, nystrom_attention(x, x, x, num_landmarks=32))
    True
    """
    with Redirect(chosen(name, options), "scaled_dot_product_attention", self_attention):
        yield


class Redirect(TorchFunctionMode):
    """Serves calls of exact attention by `choice`. `where` is what errors call the caller."""

    def __init__(self, choice: Choice, where: str, self_attention: bool) -> None:
        super().__init__()
        self.choice, self.where, self.self_attention = choice, where, self_attention
        self.calls = 0

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        serve: Any = REDIRECTED.get(func)
        if serve is None or _called_by_our_own():
            return func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            self.calls += 1
        try:
            return serve(self, *args, **(kwargs or {}))  # with this mode switched off
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.where}: {error}") from error

    def scaled_dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """In place of `functional.scaled_dot_product_attention`, for (b, h, n, d) and for (b, n, d)."""
        refuse("is_causal=True", is_causal, CAUSAL)
        refuse(f"dropout_p={dropout_p}", dropout_p, NO_WEIGHTS)
        if query.dim() == 3:
            attn_mask = attn_mask if attn_mask is None or attn_mask.dim() < 3 else attn_mask.unsqueeze(1)
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            return self.scaled_dot_product(query, key, value, attn_mask, scale=scale).squeeze(1)
        if enable_gqa:
            key, value = repeat_heads("key", key, query), repeat_heads("value", value, query)
        if attn_mask is not None and attn_mask.dim() < 4:  # (n, s) among them, which is no (batch, length)
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        key_mask = token_mask(attn_mask, key.shape[0], key.shape[2])
        is_cross = query.shape[2] != key.shape[2]
        refuse(
            "a padding mask with as many queries as keys",
            key_mask is not None and not is_cross and not self.self_attention,
            "it holds for the queries, too, if this is self-attention, which can't be told; use_attention(…, "
            "self_attention=True) says so",
        )
        query_mask = None if is_cross else key_mask
        return self.choice.attend(query, key, value, query_mask, key_mask, is_cross=is_cross, scale=scale)

    def multi_head(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Any,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        use_separate_proj_weight: bool = False,
        q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None,
        v_proj_weight: Tensor | None = None,
        static_k: Tensor | None = None,
        static_v: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """In place of `functional.multi_head_attention_forward`, for (n, b, width) and for (n, width)."""
        refuse("is_causal=True", is_causal, CAUSAL)
        refuse("attn_mask", attn_mask is not None, "attention of linear cost has no place for pairs of tokens")
        refuse("bias_k or bias_v", bias_k is not None or bias_v is not None, "it adds a key that stands nowhere")
        refuse("add_zero_attn=True", add_zero_attn, "it adds a key that stands nowhere")
        refuse("static_k or static_v", static_k is not None or static_v is not None, "it is not served")
        refuse(f"dropout={dropout_p}", training and dropout_p, NO_WEIGHTS)
        is_self = query is key
        batched = query.dim() == 3
        if not batched:
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))

        separate = (q_proj_weight, k_proj_weight, v_proj_weight)
        weights = separate if use_separate_proj_weight else in_proj_weight.chunk(3)
        biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        query, key, value = (
            functional.linear(x, weight, bias).unflatten(2, (num_heads, -1)).permute(1, 2, 0, 3)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )  # (b h n d)
        key_mask = None
        if key_padding_mask is not None:  # True, or -inf, for padding
            padding = key_padding_mask
            key_mask = ~padding if padding.dtype == torch.bool else as_boolean(padding)
        query_mask = key_mask if is_self else None

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.choice.attend(query, key, value, query_mask, key_mask, is_cross=not is_self)

        matrix = attention_map(attend, query, key) if need_weights else None
        out = attend(query, key, value) if matrix is None else matrix @ value
        out = functional.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)  # (n b width)
        if matrix is not None and average_attn_weights:
            matrix = matrix.mean(dim=1)
        return (out, matrix) if batched else (out.squeeze(1), None if matrix is None else matrix.squeeze(0))


REDIRECTED = {
    functional.scaled_dot_product_attention: Redirect.scaled_dot_product,
    functional.multi_head_attention_forward: Redirect.multi_head,
}

OUR_ATTENTIONS = "nystromformer.attention."
CAUSAL = "landmarks average over later tokens, so this attention is for encoders"
NO_WEIGHTS = "the weights it would drop are never made; set the attention's dropout to 0"


def _called_by_our_own() -> bool:
    """Whether one of our attentions is calling exact attention for a part of itself."""
    if torch.compiler.is_compiling():
        return False
    caller = sys._getframe(2)  # of `__torch_function__`
    return caller.f_globals.get("__name__", "").startswith(OUR_ATTENTIONS)


def refuse(given: str, is_given: object, reason: str) -> None:
    if is_given:
        raise ValueError(f"{given} was given, which attention of linear cost can't honor: {reason}.")
