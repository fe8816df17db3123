"""Nyström attention with an exact near field: linear attention that keeps what a pretrained model does.

Most of the weight of trained attention lies on a few keys that all queries look at, such as [CLS], on the neighbors of
each query, and on a few places far away that it looks for. Landmarks are means and blur all of them. Here each query
attends to every key exactly once: to the heavy keys, to those of its own and the two neighboring blocks, and to those
of blocks that are chosen for their content, if any, as they are; to all others through segment means, in one softmax:

    rows    r evenly spaced queries;  B = softmax(q[rows] Kᵀ), their exact softmax
    heavy   the h keys with the largest column mean of B (no gradient)
    near    keys of the own and the two neighboring blocks of s, and of the t far blocks with the most weight to the
            second order: log c + E[q]·E[k] + ½ E[q²]·Var[k] over the two blocks (no gradient); heavy ones left out
    logits  [ q·k_near | q·k̃ + log(c − w) | q·k_heavy ]  →  P_near, G
            k̃, v̄ means over m − h segments of c keys each, heavy ones left out; w of the c are near
    values  W = [v̄ ; v_heavy] + ΔW,  ΔW = (AᵀA + λ I)⁻¹ Aᵀ R,  A = G[rows],
            R = B V − P_near[rows] V_near − A [v̄ ; v_heavy],  λ = ridge · mean diag(AᵀA)
    out     P_near V_near + G W

Without near field and heavy keys λ → 0 gives F A⁻¹ B V, the paper's form; λ → ∞ is attention to pooled keys.
"""

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from nystromformer.attention.base import with_options
from nystromformer.attention.nystrom.core import plus_skip
from nystromformer.attention.nystrom.operation import LandmarkAttention
from nystromformer.attention.nystrom_local.core import (
    NystromLocalKeywords,
    NystromLocalOptions,
    attend,
    attend_to_sequences,
)
from nystromformer.attention.shared.common import (
    check_self_attention,
    checked_scale,
    full_precision,
    refuse_causal,
    refuse_forward_mode,
    rows_of_map,
    zero_masked,
)
from nystromformer.attention.shared.skip_convolution import kernel_of, skip_convolution
from nystromformer.attention.shared.varlen import as_rows, attend_as_padded_batch, packed_input


def nystrom_local_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
    num_landmarks: int = 64,
    heavy_keys: int | None = None,
    block_size: int = 32,
    chosen_blocks: int = 0,
    core_rows: int = 64,
    ridge: float = 0.01,
    exact_below: int | None = None,
    conv_weight: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    """Softmax self-attention in O(n·(m + (3 + t)·s)), exact for near, chosen and heavy keys: (b, h, n, e), in the dtype
    of `value`.

    Args:
        query, key, value: (b, h, n, d), (b, h, n, d), (b, h, n, e), of one sequence: near means near in it.
        mask: boolean (b, n), True for real tokens, anywhere. Blocks and segments are counted over valid tokens. Masked
            rows of the result are 0; what stands at masked positions, and how many there are, changes nothing.
        num_landmarks: m, heavy keys among them.
        heavy_keys: h, a quarter of `num_landmarks` by default.
        block_size: s. A query sees the keys of its own and the two neighboring blocks as they are. The result is
            exact for an example with at most m − h or at most (2 + t)·s valid tokens.
        chosen_blocks: t, blocks elsewhere that a block of queries sees as they are, too, chosen by means and variances
            of their keys. At most 256 are compared, those that core rows look at most, so that cost stays linear. Three
            of them halve the error in pretrained models, for 1.5 to 1.9 times the time; none by default.
        core_rows: r, the queries whose exact rows the values of the landmarks are fitted to.
        ridge: how much that fit is held back, relative to its own size.
        exact_below: examples with at most so many valid tokens are computed exactly, too.
        conv_weight: the kernel of a skip convolution for each head, as in `nystrom_attention`; none by default.
        scale: of the logits, d ** -0.5 by default.
        is_causal: refused when true. Landmarks average over later tokens, so this attention can't be causal.

    Nothing of n×m or n×(3 + t)·s elements is kept for the backward, and on CPUs none is made in either direction. On
    other devices, and in compiled or exported graphs, the weights of all queries, as many elements, exist for a while.

    >>> query = key = value = torch.randn(2, 8, 1000, 64)
    >>> nystrom_local_attention(query, key, value, num_landmarks=32).shape
    torch.Size([2, 8, 1000, 64])
    """
    check_self_attention(query, key, value, mask)
    options = NystromLocalOptions(
        num_landmarks=num_landmarks,
        heavy_keys=heavy_keys,
        block_size=block_size,
        chosen_blocks=chosen_blocks,
        core_rows=core_rows,
        ridge=ridge,
        exact_below=exact_below,
    )
    scale = checked_scale(scale, query)
    refuse_causal(is_causal)
    refuse_forward_mode(query, key, value, conv_weight)
    if conv_weight is not None:
        conv_weight = kernel_of(conv_weight, value.shape[1], value.dtype)

    with full_precision(query):
        out = attend(query, key, value, mask, scale, options)
        if conv_weight is not None:
            out = out + skip_convolution(zero_masked(value, mask), conv_weight)
        return zero_masked(out, mask)


@with_options(NystromLocalOptions)
def nystrom_local_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None = None, *,
    max_seqlen: int | None = None,
    conv_weight: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    **options: Unpack[NystromLocalKeywords],
) -> Tensor:  # fmt: skip
    """`nystrom_local_attention` of sequences that are packed one after the other: (t, h, e), in the dtype of `value`.

    Each sequence is a view, for which the borders are read: on other devices than CPUs that waits for the device once
    per call. A compiled graph can't: it pads the sequences to `max_seqlen`, which must be given there.

    Args:
        query, key, value: (t, h, d), (t, h, d), (t, h, e): the tokens of all sequences. Or nested tensors of the jagged
            layout, (b, j, h, d) or (b, h, j, d), which need no `cu_seqlens`; the result is then nested too.
        cu_seqlens: whole numbers (b + 1), from 0 to t, as flash-attn takes them: where each sequence begins and the
            last one ends. Sequences can't be empty.
        num_landmarks: m, for each sequence.
        max_seqlen: the most tokens that a sequence has; needed in compiled graphs, which pad to it.
        heavy_keys, block_size, chosen_blocks, core_rows, ridge, exact_below, conv_weight, scale, is_causal: as in
            `nystrom_local_attention`.

    >>> query = key = value = torch.randn(1000, 8, 64)
    >>> borders = torch.tensor([0, 100, 700, 1000], dtype=torch.int32)
    >>> nystrom_local_attention_varlen(query, key, value, borders, num_landmarks=32).shape
    torch.Size([1000, 8, 64])
    """
    packed = packed_input(query, key, value, cu_seqlens)
    if not packed.is_self_attention:
        raise ValueError("query and key are nested with other lengths: must be of the same sequences; near means near.")
    given = NystromLocalOptions(**options)
    scale, kernel = packed.checked(scale, conv_weight, is_causal)

    def attend_and_skip(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, _: Tensor) -> Tensor:
        return plus_skip(attend(query, key, value, mask, scale, given), value, kernel)

    with full_precision(packed.query):
        if torch.compiler.is_compiling():
            return packed.result(attend_as_padded_batch(attend_and_skip, packed, max_seqlen))
        sequences = packed.sequences()
        outs = attend_to_sequences(*sequences, scale=scale, options=given)
        outs = [plus_skip(out, value, kernel) for out, value in zip(outs, sequences[2], strict=True)]
        return packed.result(torch.cat([as_rows(out) for out in outs]))


@with_options(NystromLocalOptions)
def nystrom_local_attention_weights(
    query: Tensor,
    key: Tensor,
    rows: Sequence[int] | Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    **options: Unpack[NystromLocalKeywords],
) -> Tensor:
    """The asked rows of the approximated softmax matrix, (b, h, len(rows), n), in linear memory.

    Multiplied by `value` they give those rows of `nystrom_local_attention`. They come without gradients.

    >>> query = key = torch.randn(1, 2, 1000, 16)
    >>> nystrom_local_attention_weights(query, key, rows=[0, -1]).shape
    torch.Size([1, 2, 2, 1000])
    """
    return rows_of_map(nystrom_local_attention, query, key, rows, mask, scale=scale, **options)


class NystromLocalAttention(LandmarkAttention):
    """`nystrom_local_attention` as `build_attention("nystrom-local-64", ...)` makes it.

    It has no parameters and suits pretrained weights as they are. `conv_kernel_size` adds the paper's skip convolution
    for training.
    """

    name = "nystrom-local"
    suits_trained_weights = True
    operation = staticmethod(nystrom_local_attention)
    packed_operation = staticmethod(nystrom_local_attention_varlen)

    @with_options(NystromLocalOptions)
    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        max_length: int | None = None,
        *,
        conv_kernel_size: int | None = None,
        **options: Unpack[NystromLocalKeywords],
    ) -> None:
        super().__init__(num_heads, head_dim, max_length, NystromLocalOptions(**options), conv_kernel_size)
