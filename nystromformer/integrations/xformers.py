"""`NystromAttention` as xformers had it up to 0.0.28, for code that still imports it.

    from nystromformer.integrations.xformers import NystromAttention

Same arguments, attributes, weights and results, without matrices of n×m elements: two calls of
`scaled_dot_product_attention` stand around the pseudoinverse. It differs from `nystrom_attention` where xformers did:
means count masked tokens as zeros, and masked landmarks take part. xformers is not needed.
"""

import torch
from torch import Tensor, nn

from nystromformer.attention.nystrom.pseudoinverse import exact_pinv, iterative_pinv
from nystromformer.attention.shared.common import (
    at_least_float32,
    check_floating,
    full_precision,
    shape_of,
    softmax_attention,
)
from nystromformer.attention.shared.skip_convolution import SkipConvolution
from nystromformer.checks import check_at_least, check_fraction, check_odd


class NystromAttention(nn.Module):
    """`xformers.components.attention.NystromAttention`, on queries, keys and values whose heads are split.

    Args:
        dropout: on the output.
        num_heads: of which (b·h, n, d) is made; used by the skip connection alone.
        num_landmarks: m; exact for at most m keys, or fewer than m queries.
        landmark_pooling: a module from (b·h, n, d) to (b·h, m, d); means of m successive segments by default.
        causal: refused when true, because landmarks average over later tokens.
        use_razavi_pinverse: iterate for the pseudoinverse, rather than decompose.
        pinverse_original_init: start the iteration from a norm over the whole batch; outputs then depend on the batch.
        inv_iterations: steps of the pseudoinverse.
        v_skip_connection: a module on the values (b, h, n, d) whose result is added.
        conv_kernel_size: odd; without `v_skip_connection` adds a convolution of the values along the sequence.

    >>> attention = NystromAttention(dropout=0.0, num_heads=4, num_landmarks=32)
    >>> q = k = v = torch.randn(2 * 4, 1000, 16)
    >>> attention(q, k, v).shape
    torch.Size([8, 1000, 16])
    """

    requires_input_projection = True
    requires_head_dimension = False
    requires_separate_masks = True
    requires_same_k_q_dimensions = False
    requires_skip_multi_head = False
    requires_squared_context = False
    supports_attention_mask = False
    supports_key_padding_mask = True

    def __init__(
        self,
        dropout: float,
        num_heads: int,
        num_landmarks: int = 64,
        landmark_pooling: nn.Module | None = None,
        causal: bool = False,
        use_razavi_pinverse: bool = True,
        pinverse_original_init: bool = False,
        inv_iterations: int = 6,
        v_skip_connection: nn.Module | None = None,
        conv_kernel_size: int | None = None,
    ) -> None:
        super().__init__()
        check_fraction("dropout", dropout)
        check_at_least("num_heads", num_heads, 1)
        check_at_least("num_landmarks", num_landmarks, 1, "the paper uses 64")
        check_at_least("inv_iterations", inv_iterations, 0, "the paper uses 6")
        if causal:
            raise ValueError(
                "causal=True: must be False, because landmarks average over later tokens, so that earlier ones see "
                "them whatever is masked; for causal attention use "
                "torch.nn.functional.scaled_dot_product_attention(..., is_causal=True)."
            )
        self.num_heads, self.num_landmarks, self.causal = num_heads, num_landmarks, causal
        self.use_razavi_pinverse, self.pinverse_original_init = use_razavi_pinverse, pinverse_original_init
        self.inv_iterations = inv_iterations
        self.attn_drop = nn.Dropout(dropout)
        self.skip_connection = v_skip_connection
        if v_skip_connection is None and conv_kernel_size is not None:
            check_odd("conv_kernel_size", conv_kernel_size)
            self.skip_connection = SkipConvolution(num_heads, conv_kernel_size)
        self.landmark_pooling = AvgPool(num_landmarks) if landmark_pooling is None else landmark_pooling

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, att_mask: Tensor | None = None
    ) -> Tensor:
        """Attend over the last dimension but one of (b·h, n, d), (b, n, d) or (b, h, n, d): of the shape of `q`.

        With (b, n, h, d) that dimension holds the heads, and each token attends among its own heads: so did xformers.

        Args:
            key_padding_mask: (b, n), or (b·h, 1, n) for each head; boolean with True for real tokens, or floating
                with -inf for padding and otherwise numbers that are added to the logits.
            att_mask: refused; xformers ignored it.
        """
        self._check_input(q, k, v, att_mask)
        shape = q.shape[:-1] + v.shape[-1:]
        q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))  # (b·h n d)
        bias = None
        if key_padding_mask is not None:
            bias = _additive(key_padding_mask, q, k)  # (b·h 1 n)
            real = ~bias.isinf().mT
            zero = torch.zeros((), dtype=q.dtype, device=q.device)
            q, k = torch.where(real, q, zero), torch.where(real, k, zero)
        with full_precision(q):
            out = self._attend(q, k, v, bias)
        if self.skip_connection is not None:
            heads = v.unflatten(0, (-1, self.num_heads))  # (b h n d)
            out = out + self.skip_connection(heads).flatten(0, 1)
        return self.attn_drop(out.reshape(shape))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        too_few_queries = isinstance(self.landmark_pooling, AvgPool) and self.num_landmarks > q.shape[1]
        if self.num_landmarks >= k.shape[1] or too_few_queries:
            return _softmax_attention(q, k, v, bias)
        queries, keys = self.landmark_pooling(q), self.landmark_pooling(k)  # (b·h m d)
        wide, scale = at_least_float32(q.dtype), q.shape[2] ** -0.5
        A = torch.softmax(scale * queries.to(wide) @ keys.to(wide).mT, dim=-1)
        scaling = "batch" if self.pinverse_original_init else "matrix"
        inverse = iterative_pinv(A, self.inv_iterations, scaling) if self.use_razavi_pinverse else exact_pinv(A)
        BV = _softmax_attention(queries, k, v, bias)
        W = (inverse @ BV.to(wide)).to(v.dtype)
        return _softmax_attention(q, keys, W, None)

    def _check_input(self, q: Tensor, k: Tensor, v: Tensor, att_mask: Tensor | None) -> None:
        if att_mask is not None:
            raise ValueError(
                "att_mask was given: masks over pairs of tokens do not fit attention of linear cost; give "
                "key_padding_mask for padding, and leave att_mask out."
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_floating(name, x)
            if x.dim() not in (3, 4):
                raise ValueError(f"{name} has shape {shape_of(x)}: must be (b·h, n, d) or (b, h, n, d).")
        if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2] or k.shape[-2] != v.shape[-2] or q.shape[-1] != k.shape[-1]:
            raise ValueError(
                f"q, k and v have shapes {shape_of(q)}, {shape_of(k)} and {shape_of(v)}: leading dimensions, the "
                f"lengths of k and v, and the widths of q and k must be equal."
            )
        rows = v.shape[:-2].numel()
        if self.skip_connection is not None and (rows % self.num_heads or q.shape[-2] != k.shape[-2]):
            raise ValueError(
                f"v has shape {shape_of(v)} and q {shape_of(q)}: the skip connection needs one length, and "
                f"{rows} = b·h divisible by num_heads={self.num_heads}."
            )

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_landmarks={self.num_landmarks}, inv_iterations={self.inv_iterations}"


class AvgPool(nn.Module):
    """Means of `n` successive segments of (b, length, d): (b, n, d). The last segments are one longer where they must.

    >>> AvgPool(2)(torch.arange(5.0).view(1, 5, 1)).flatten()
    tensor([0.5000, 3.0000])
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        check_at_least("n", n, 1)
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        size, longer = divmod(x.shape[1], self.n)
        if size == 0:
            raise ValueError(f"x has {x.shape[1]} tokens: must have at least as many as landmarks, {self.n}.")
        boundary = (self.n - longer) * size
        means = x[:, :boundary].unflatten(1, (self.n - longer, size)).mean(dim=2)
        if not longer:
            return means
        return torch.cat([means, x[:, boundary:].unflatten(1, (longer, size + 1)).mean(dim=2)], dim=1)


def _additive(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask as numbers to add to logits, (b·h, 1, n), in the dtype of `q`."""
    rows, length = k.shape[:2]
    fits = mask.dim() == 2 and mask.shape[1] == length and mask.shape[0] > 0 and rows % mask.shape[0] == 0
    if not fits and mask.shape != (rows, 1, length):
        raise ValueError(
            f"key_padding_mask has shape {shape_of(mask)}: must be (b, {length}) with {rows} = b·h, or "
            f"({rows}, 1, {length})."
        )
    if q.shape[1] != length:
        raise ValueError(
            f"key_padding_mask was given with {q.shape[1]} queries and {length} keys: it is for both, so there must be "
            f"as many; for cross-attention use nystromformer.nystrom_attention with query_mask and key_mask."
        )
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    elif not mask.is_floating_point():
        raise TypeError(f"key_padding_mask has dtype {mask.dtype}: must be boolean or floating; use mask.bool().")
    if mask.dim() == 2:
        mask = mask[:, None, None, :].expand(-1, rows // mask.shape[0], -1, -1).flatten(0, 1)
    return mask.to(q.dtype)


def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """softmax(q kᵀ/√d + bias) v for (b·h, n, d); 0 where every key is masked."""
    scale = q.shape[2] ** -0.5
    q, k, v = (x.to(v.dtype)[:, None] for x in (q, k, v))
    if bias is None:
        return softmax_attention(q, k, v, None, scale)[:, 0]
    none = bias.isneginf().all(dim=2, keepdim=True)  # (b·h 1 1): a softmax over nothing is 0/0
    out = softmax_attention(q, k, v, bias.masked_fill(none, 0)[:, None], scale)[:, 0]
    return out.masked_fill(none, 0)
