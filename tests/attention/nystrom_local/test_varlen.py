"""Packed sequences with an exact near field: each gives what it gives alone, forward and backward."""

import pytest
import torch
from largest_tensor import Largest

from nystromformer import nystrom_local_attention_varlen
from nystromformer.attention import nystrom_local_attention
from nystromformer.attention.nystrom_local import core as nystrom_local_core
from nystromformer.attention.shared.varlen import lengths_to_offsets

LENGTHS = [5, 1, 40, 17, 8, 130, 90]
SIZES = {"num_landmarks": 8, "block_size": 4, "core_rows": 6}
EXACT_UP_TO = nystrom_local_core.NystromLocalOptions(**SIZES).exact_up_to


def inputs(lengths=LENGTHS, e=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    draw = lambda width: torch.randn(sum(lengths), 2, width, generator=generator, dtype=torch.float64).to(dtype)
    return [draw(width).requires_grad_() for width in (6, 6, e)]


def borders(lengths=LENGTHS):
    return lengths_to_offsets(torch.tensor(lengths))


def kernel():
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()


def alone(query, key, value, lengths=LENGTHS, **options):
    pieces = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
    attend = lambda piece: nystrom_local_attention(*(x.transpose(0, 1)[None] for x in piece), **options)
    return torch.cat([attend(piece)[0].transpose(0, 1) for piece in pieces])


def with_gradients(out, leaves):
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    return [out, *torch.autograd.grad(out, leaves, weight)]


@pytest.mark.parametrize("e", [6, 3, 9])
@pytest.mark.parametrize("options", [{}, {"exact_below": 20}, {"heavy_keys": 0, "scale": 0.2}], ids=str)
def test_each_sequence_gives_what_it_gives_alone_with_gradients(e, options):
    leaves, weights = inputs(e=e), kernel()
    options = {**SIZES, **options, "conv_weight": weights}
    found = with_gradients(nystrom_local_attention_varlen(*leaves, borders(), **options), [*leaves, weights])
    expected = with_gradients(alone(*leaves, **options), [*leaves, weights])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


def test_short_sequences_are_exact():
    query, key, value = (x.detach() for x in inputs())
    out = nystrom_local_attention_varlen(query, key, value, borders(), **SIZES)
    for q, k, v, found in zip(*(x.split(LENGTHS) for x in (query, key, value, out)), strict=True):
        exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v)))
        assert torch.allclose(found, exact.transpose(0, 1), atol=1e-9) == (len(q) <= EXACT_UP_TO)


def test_the_fits_of_all_sequences_are_one_batch(monkeypatch):
    shapes, original = [], nystrom_local_core.corrected_values
    note = lambda exact, *args: shapes.append(exact.shape) or original(exact, *args)
    monkeypatch.setattr(nystrom_local_core, "corrected_values", note)
    nystrom_local_attention_varlen(*inputs(), borders(), **SIZES)
    assert shapes == [(2 * sum(length > EXACT_UP_TO for length in LENGTHS), 6, 6)]


def test_nothing_of_n_by_m_elements_is_made():
    lengths, m = [700, 20, 304], 64
    leaves = inputs(lengths, dtype=torch.float32)
    with Largest() as largest:
        nystrom_local_attention_varlen(*leaves, borders(lengths), num_landmarks=m, block_size=8).sum().backward()
    assert largest.elements < sum(lengths) * 2 * m


@pytest.mark.slow
def test_compiles_as_one_graph_that_pads_to_the_longest_sequence():
    run = torch.compile(
        lambda *x: nystrom_local_attention_varlen(*x, max_seqlen=60, **SIZES), fullgraph=True, backend="eager"
    )
    for lengths in ([5, 1, 40, 17], [2, 3, 57, 1]):
        leaves = inputs(lengths)
        expected = with_gradients(alone(*leaves, lengths, **SIZES), leaves)
        for x, y in zip(with_gradients(run(*leaves, borders(lengths)), leaves), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9)
    unbounded = torch.compile(nystrom_local_attention_varlen, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="max_seqlen=None in a compiled graph: must be"):
        unbounded(*inputs(), borders())


def test_sequences_of_queries_and_keys_are_the_same():
    query, key, value = inputs()
    other = [torch.nested.nested_tensor_from_jagged(x, borders(LENGTHS[::-1]).long()) for x in (key, value)]
    with pytest.raises(ValueError, match="query and key are nested with other lengths: must be of the same"):
        nystrom_local_attention_varlen(torch.nested.nested_tensor_from_jagged(query, borders().long()), *other)
