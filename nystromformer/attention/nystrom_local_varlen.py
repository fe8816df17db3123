"""Nyström attention with an exact near field, of packed sequences: each gives what it gives alone.

Each sequence is a view, for which the borders are read: on other devices than CPUs that waits for the device once per
call. A compiled graph can't: it pads the sequences to `max_seqlen`, which must be given there.
"""

import torch
from torch import Tensor

from nystromformer.attention.common import checked_scale, full_precision, refuse_causal, refuse_forward_mode
from nystromformer.attention.nystrom_core import plus_skip
from nystromformer.attention.nystrom_local_core import NystromLocalOptions, attend, attend_to_sequences
from nystromformer.attention.skip_convolution import kernel_of
from nystromformer.attention.valid_spans import as_batch, as_rows
from nystromformer.attention.varlen import attend_as_padded_batch, packed_input


def nystrom_local_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None = None,
    *,
    num_landmarks: int = 64,
    max_seqlen: int | None = None,
    heavy_keys: int | None = None,
    block_size: int = 32,
    core_rows: int = 64,
    ridge: float = 0.01,
    exact_below: int | None = None,
    conv_weight: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """`nystrom_local_attention` of sequences that are packed one after the other: (t, h, e), in the dtype of `value`.

    Args:
        query, key, value: (t, h, d), (t, h, d), (t, h, e): the tokens of all sequences. Or nested tensors of the jagged
            layout, (b, j, h, d) or (b, h, j, d), which need no `cu_seqlens`; the result is then nested too.
        cu_seqlens: whole numbers (b + 1), from 0 to t, as flash-attn takes them: where each sequence begins and the
            last one ends. Sequences can't be empty.
        num_landmarks: m, for each sequence.
        max_seqlen: the most tokens that a sequence has; needed in compiled graphs, which pad to it.
        heavy_keys, block_size, core_rows, ridge, exact_below, conv_weight, scale, is_causal: as in
            `nystrom_local_attention`.

    >>> query = key = value = torch.randn(1000, 8, 64)
    >>> borders = torch.tensor([0, 100, 700, 1000], dtype=torch.int32)
    >>> nystrom_local_attention_varlen(query, key, value, borders, num_landmarks=32).shape
    torch.Size([1000, 8, 64])
    """
    packed = packed_input(query, key, value, cu_seqlens)
    if not packed.is_self_attention:
        raise ValueError("query and key are nested with other lengths: must be of the same sequences; near means near.")
    options = NystromLocalOptions(
        num_landmarks=num_landmarks,
        heavy_keys=heavy_keys,
        block_size=block_size,
        core_rows=core_rows,
        ridge=ridge,
        exact_below=exact_below,
    )
    scale = checked_scale(scale, as_batch(packed.query))
    refuse_causal(is_causal)
    refuse_forward_mode(packed.query, packed.key, packed.value, conv_weight)
    if conv_weight is not None:
        conv_weight = kernel_of(conv_weight, packed.value.shape[1], packed.value.dtype)

    def attend_and_skip(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, _: Tensor) -> Tensor:
        return plus_skip(attend(query, key, value, mask, scale, options), value, conv_weight)

    with full_precision(packed.query):
        if torch.compiler.is_compiling():
            return packed.result(attend_as_padded_batch(attend_and_skip, packed, max_seqlen))
        sequences = packed.sequences()
        outs = attend_to_sequences(*sequences, scale=scale, options=options)
        outs = [plus_skip(out, value, conv_weight) for out, value in zip(outs, sequences[2], strict=True)]
        return packed.result(torch.cat([as_rows(out) for out in outs]))
