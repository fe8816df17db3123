"""Nyström attention with an exact near field, of packed sequences: each gives what it gives alone.

Each sequence is a view, for which the borders are read: on other devices than CPUs that waits for the device once per
call. A compiled graph can't: it pads the sequences to `max_seqlen`, which must be given there.
"""

from typing import Unpack

import torch
from torch import Tensor

from nystromformer.attention.base import with_options
from nystromformer.attention.common import full_precision
from nystromformer.attention.nystrom_core import plus_skip
from nystromformer.attention.nystrom_local_core import (
    NystromLocalKeywords,
    NystromLocalOptions,
    attend,
    attend_to_sequences,
)
from nystromformer.attention.valid_spans import as_rows
from nystromformer.attention.varlen import attend_as_padded_batch, packed_input


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
