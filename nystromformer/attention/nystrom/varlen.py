"""Nyström attention of packed sequences: each gives what it gives alone, and nothing is padded.

Where Python can read the borders, on CPUs, machine code takes all sequences as they lie. Without it both passes run
over each sequence as a view, and the pseudoinverses are one batch. Elsewhere, on other devices and in compiled graphs,
the tokens are divided into chunks that each belong to one sequence: their number depends on those of tokens and
sequences alone. So nothing waits for a device, and as many kernels are launched for a hundred sequences as for one:

    F W    the queries of each chunk attend to the landmarks of its sequence
    B V    the landmarks of its sequence attend to the keys of each chunk, and the parts are merged by log-sum-exp
"""

from typing import Unpack

import torch
from torch import Tensor

from nystromformer.attention.base import with_options
from nystromformer.attention.nystrom.core import NystromKeywords, NystromOptions, attend_packed, softmax_inverse
from nystromformer.attention.nystrom.landmarks import Segments, means_over, segments_of_ranks
from nystromformer.attention.shared.common import (
    full_precision,
    key_padding_mask,
    softmax_attention,
)
from nystromformer.attention.shared.partial_softmax import MASKED, attention_with_lse
from nystromformer.attention.shared.skip_convolution import skip_convolution
from nystromformer.attention.shared.varlen import PackedInput, Packing, Spread, as_batch, as_rows, packed_input
from nystromformer.checks import check_at_least

CHUNK = 256
"""Tokens in a chunk. More waste more places at the end of each sequence, fewer make products too small to be fast."""


@with_options(NystromOptions)
def nystrom_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None = None, *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen: int | None = None,
    conv_weight: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    **options: Unpack[NystromKeywords],
) -> Tensor:  # fmt: skip
    """`nystrom_attention` of sequences that are packed one after the other: (t, h, e), in the dtype of `value`.

    Each sequence's rows are what `nystrom_attention` gives for it alone: its own landmarks, exact where it is short,
    zeros beyond its ends for the convolution. Memory is proportional to the tokens.

    Args:
        query, key, value: (t, h, d), (s, h, d), (s, h, e): the tokens of all sequences. Or nested tensors of the jagged
            layout, (b, j, h, d) or (b, h, j, d), which need no `cu_seqlens`; the result is then nested too.
        cu_seqlens: whole numbers (b + 1), from 0 to t, as flash-attn takes them: where each sequence begins and the
            last one ends. Sequences can't be empty; that is checked where it waits for no device.
        num_landmarks: m, for each sequence.
        cu_seqlens_q, cu_seqlens_k: in place of `cu_seqlens`, for cross-attention between b pairs of sequences.
        max_seqlen: is not needed here, where other attentions need it in compiled graphs.
        conv_weight, pinv_iterations, pinv_scaling, landmarks, grid_shape, pinv, exact_below, scale, is_causal: as in
            `nystrom_attention`.

    >>> query = key = value = torch.randn(1000, 8, 64)
    >>> borders = torch.tensor([0, 100, 700, 1000], dtype=torch.int32)
    >>> nystrom_attention_varlen(query, key, value, borders, num_landmarks=32).shape
    torch.Size([1000, 8, 64])
    """
    packed = packed_input(query, key, value, cu_seqlens, cu_seqlens_q, cu_seqlens_k)
    given = NystromOptions(**options)
    scale, kernel = packed.checked(scale, conv_weight, is_causal)
    if max_seqlen is not None:
        check_at_least("max_seqlen", max_seqlen, 1)

    with full_precision(packed.query):
        # Other landmarks compare the tokens of a sequence, and scaling by the batch needs all of it together.
        by_sequence = packed.queries.lengths is not None and given.pinv_scaling == "matrix"
        if by_sequence or (given.landmarks != "segment_means" and not torch.compiler.is_compiling()):
            return packed.result(attend_packed(packed, kernel, scale, given))
        out = attend_in_chunks(packed, scale, given)
        if kernel is not None:
            out = out + spaced_convolution(packed.value, packed.keys, kernel)
        return packed.result(out)


def attend_in_chunks(packed: PackedInput, scale: float, options: NystromOptions) -> Tensor:
    """F A⁺ B V (t, h, e), exact for short sequences, without a shape that depends on what `cu_seqlens` holds."""
    if options.landmarks != "segment_means":
        raise ValueError(
            f"landmarks={options.landmarks!r} in a compiled graph of packed sequences: must be 'segment_means' there."
        )
    m, dtype = options.num_landmarks, packed.value.dtype
    query, key, value = packed.as_one
    query_segments = key_segments = packed_segments(packed.queries, m)
    if not packed.is_self_attention:
        key_segments = packed_segments(packed.keys, m)
    Q = packed_means(query, query_segments, packed.queries.number)  # (b h m d)
    K = packed_means(key, key_segments, packed.keys.number)
    occupied, allowed = (x.counts.view(-1, 1, m) > 0 for x in (query_segments, key_segments))
    Z = softmax_inverse(Q, K, occupied, allowed[:, :, None], scale, options)
    BV = attend_to_chunks(Q.to(dtype), packed.key, packed.value, packed.keys, scale)  # (b h m e)
    W = (Z @ BV.to(Z.dtype)).to(dtype)
    # With one key per segment K̃ = K, so that F is the exact softmax matrix and belongs to the values themselves.
    few_keys = (packed.keys.counts <= m)[:, None, None, None]
    W = torch.where(few_keys, packed_means(value, key_segments, packed.keys.number).to(dtype), W)

    chunks = Chunks.of(packed.queries)
    out = softmax_attention(
        chunks.arrange(packed.query),
        K.to(dtype)[chunks.owner],
        W[chunks.owner],
        allowed[chunks.owner][:, :, None],
        scale,
    )
    out = chunks.restore(out)  # (t h e)
    if not packed.is_self_attention:
        # With one query per segment Q̃ = Q, so that B V already holds the exact row of each query.
        own_rows = BV.transpose(1, 2).flatten(0, 1).index_select(0, query_segments.index[0])
        out = torch.where((packed.queries.counts <= m)[packed.queries.owner][:, None, None], own_rows, out)
    return out if options.exact_up_to == m else _exact_where_short(out, packed, scale, options.exact_up_to)


def packed_segments(sequences: Packing, num_segments: int) -> Segments:
    """The segments of all sequences as those of one example, one sequence's after the other's: (1, t), (1, b·m)."""
    counts = segments_of_ranks(sequences.counts.new_zeros(sequences.number, 0), sequences.counts, num_segments).counts
    own = sequences.rank * num_segments // sequences.counts[sequences.owner]
    index = sequences.owner * num_segments + own
    return Segments(index=index[None], counts=counts.view(1, -1), valid=sequences.counts.sum(0, keepdim=True))


def packed_means(tokens: Tensor, divided: Segments, number: int) -> Tensor:
    """Means of `tokens` (1, h, t, d) over `packed_segments`: (b, h, m, d)."""
    return means_over(tokens, divided)[0].unflatten(1, (number, -1)).transpose(0, 1)


class Chunks:
    """Packed tokens in chunks that each belong to one sequence."""

    def __init__(self, rows: Spread, size: int) -> None:
        self.rows, self.size = rows, size
        self.owner = rows.owner_of(torch.arange(0, rows.places, size, device=rows.first.device))  # (g,)

    @classmethod
    def of(cls, sequences: Packing) -> "Chunks":
        size = max(1, min(CHUNK, sequences.tokens))
        return cls(sequences.chunked(size), size)

    @property
    def present(self) -> Tensor:
        """(g, size): the places that hold a token."""
        return self.rows.present.view(-1, self.size)

    def arrange(self, x: Tensor) -> Tensor:
        """(t, h, d) → (g, h, size, d)."""
        return self.rows.spread(x).unflatten(0, (-1, self.size)).transpose(1, 2)

    def restore(self, x: Tensor) -> Tensor:
        """(g, h, size, d) → (t, h, d)."""
        return self.rows.collect(x.transpose(1, 2).flatten(0, 1))


def attend_to_chunks(queries: Tensor, key: Tensor, value: Tensor, sequences: Packing, scale: float) -> Tensor:
    """Softmax attention of `queries` (b, h, m, d) to the tokens of their own sequence, in `key` and `value` (t, h, d).

    Each chunk of keys is one part of a softmax; parts are merged by their log-sum-exp: (b, h, m, e).
    """
    chunks, width = Chunks.of(sequences), value.shape[2]
    wide = torch.promote_types(value.dtype, torch.float32)
    missing = queries.shape[3] - width
    if missing > 0:
        value = torch.nn.functional.pad(value, (0, missing))
    elif missing < 0:
        queries, key = (torch.nn.functional.pad(x, (0, -missing)) for x in (queries, key))
    bias = torch.where(chunks.present, 0.0, MASKED).to(wide)[:, None, None].expand(-1, queries.shape[1], -1, -1)
    parts, logsumexp = attention_with_lse(
        queries[chunks.owner], chunks.arrange(key), chunks.arrange(value), bias, scale
    )  # (g h m e), (g h m)
    shape = sequences.number, *logsumexp.shape[1:]
    index = chunks.owner[:, None, None].expand_as(logsumexp)
    most = logsumexp.detach().new_full(shape, MASKED).scatter_reduce(0, index, logsumexp.detach(), "amax")
    weight = torch.exp(logsumexp - most[chunks.owner])
    total = weight.new_zeros(shape).index_add(0, chunks.owner, weight)
    summed = weight.new_zeros(*shape, parts.shape[3]).index_add(0, chunks.owner, weight[..., None] * parts)
    return (summed / total[..., None])[..., :width].to(value.dtype)


def spaced_convolution(value: Tensor, sequences: Packing, kernel: Tensor) -> Tensor:
    """The skip convolution of `value` (t, h, e): with half a kernel of zeros between sequences none sees another."""
    rows = sequences.spaced(kernel.shape[1] // 2)
    return rows.collect(as_rows(skip_convolution(as_batch(rows.spread(value)), kernel)))


def _exact_where_short(out: Tensor, packed: PackedInput, scale: float, places: int) -> Tensor:
    """`out` (t, h, e) with the rows of sequences of at most `places` tokens replaced by exact ones."""
    sides = (packed.queries,) if packed.is_self_attention else (packed.queries, packed.keys)
    short = torch.stack([each.counts <= places for each in sides]).all(0)  # (b,)
    queries, keys = _Front(packed.queries, places), _Front(packed.keys, places)
    exact = softmax_attention(
        queries.gather(packed.query),
        keys.gather(packed.key),
        keys.gather(packed.value),
        key_padding_mask(keys.present),
        scale,
    )
    return torch.where(short[packed.queries.owner][:, None, None], queries.scatter(exact), out)


class _Front:
    """The first `places` tokens of each sequence, side by side."""

    def __init__(self, sequences: Packing, places: int) -> None:
        place = torch.arange(places, device=sequences.offsets.device)
        self.present = place < sequences.counts[:, None]  # (b p)
        self.source = torch.where(self.present, sequences.offsets[:-1, None] + place, 0)
        self.place = sequences.owner * places + sequences.rank.clamp(max=places - 1)  # (t,)

    def gather(self, x: Tensor) -> Tensor:
        """(t, h, d) → (b, h, places, d), 0 where there is no token."""
        moved = x.index_select(0, self.source.flatten()).unflatten(0, self.source.shape)
        return moved.masked_fill(~self.present[..., None, None], 0).transpose(1, 2)

    def scatter(self, x: Tensor) -> Tensor:
        """(b, h, places, d) → (t, h, d); what stands in rows of longer sequences has no meaning."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.place)
