"""Packed sequences: each gives what it gives alone, forward and backward, on CPUs and in graphs for other devices."""

import pytest
import torch
from largest_tensor import Largest
from oracles import convolved, nystrom_head

from nystromformer import nystrom_attention, nystrom_attention_varlen
from nystromformer.attention.native import without_native
from nystromformer.attention.nystrom import core as nystrom_core
from nystromformer.attention.nystrom import varlen as nystrom_varlen
from nystromformer.attention.shared import varlen
from nystromformer.bench.measure import Kernels

LENGTHS = [5, 1, 40, 17, 8, 300, 90]
KEY_LENGTHS = [30, 9, 3, 17, 100, 8, 4]
M = 8


def borders(lengths):
    return varlen.lengths_to_offsets(torch.tensor(lengths))


def rows(lengths, width=6, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(lengths), 2, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def inputs(lengths=LENGTHS, key_lengths=None, e=6, dtype=torch.float64):
    others = key_lengths or lengths
    return [rows(lengths, 6, 1, dtype), rows(others, 6, 2, dtype), rows(others, e, 3, dtype)]


def kernel():
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()


def alone(query, key, value, lengths=LENGTHS, key_lengths=None, **options):
    """What `nystrom_attention` gives for each sequence by itself."""
    pieces = zip(query.split(lengths), *(x.split(key_lengths or lengths) for x in (key, value)), strict=True)
    attend = lambda piece: nystrom_attention(*(x.transpose(0, 1)[None] for x in piece), num_landmarks=M, **options)
    return torch.cat([attend(piece)[0].transpose(0, 1) for piece in pieces])


def with_gradients(out, *leaves):
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, weight)]


def assert_equal(found, expected, atol=1e-9):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=atol)


@pytest.fixture(params=["sequences", "chunks"])
def way(request, monkeypatch):
    """By sequence, as on CPUs, and in chunks, as where Python can't read the borders."""
    if request.param == "chunks":
        monkeypatch.setattr(varlen, "is_readable", lambda x: False)
        monkeypatch.setattr(nystrom_varlen, "CHUNK", 32)
    return request.param


def test_equals_the_papers_formula_on_each_sequence(way):
    query, key, value = inputs(e=3)
    weights = kernel()
    out = nystrom_attention_varlen(query, key, value, borders(LENGTHS), num_landmarks=M, conv_weight=weights)
    for q, k, v, found in zip(*(x.split(LENGTHS) for x in (query, key, value, out)), strict=True):
        for h in range(2):
            expected = nystrom_head(q[:, h], k[:, h], v[:, h], M) + convolved(v[:, h], weights[h])
            torch.testing.assert_close(found[:, h], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("e", [6, 3, 9])
@pytest.mark.parametrize("options", [{}, {"exact_below": 20}, {"pinv_iterations": 4, "scale": 0.2}], ids=str)
def test_each_sequence_gives_what_it_gives_alone_with_gradients(way, e, options):
    leaves, weights = inputs(e=e), kernel()
    out = nystrom_attention_varlen(*leaves, borders(LENGTHS), num_landmarks=M, conv_weight=weights, **options)
    expected = alone(*leaves, conv_weight=weights, **options)
    assert_equal(with_gradients(out, *leaves, weights), with_gradients(expected, *leaves, weights))


@pytest.mark.parametrize("options", [{}, {"exact_below": 20}], ids=str)
def test_cross_attention_between_pairs_of_sequences(way, options):
    leaves = inputs(LENGTHS, KEY_LENGTHS)
    both = {"cu_seqlens_q": borders(LENGTHS), "cu_seqlens_k": borders(KEY_LENGTHS)}
    out = nystrom_attention_varlen(*leaves, **both, num_landmarks=M, **options)
    expected = alone(*leaves, LENGTHS, KEY_LENGTHS, **options)
    assert_equal(with_gradients(out, *leaves), with_gradients(expected, *leaves))


def test_one_sequence_is_the_plain_operation(way):
    leaves = inputs([70])
    out = nystrom_attention_varlen(*leaves, borders([70]), num_landmarks=M)
    assert_equal([out], [alone(*leaves, [70])], atol=1e-12)


@pytest.mark.parametrize("options", [{"landmarks": "kmeans"}, {"pinv": "exact"}], ids=str)
def test_other_landmarks_and_pseudoinverses(options):
    leaves = inputs()
    out = nystrom_attention_varlen(*leaves, borders(LENGTHS), num_landmarks=M, **options)
    assert_equal([out], [alone(*leaves, **options)])


def test_kmeans_where_borders_cannot_be_read_goes_by_sequence(monkeypatch):
    monkeypatch.setattr(varlen, "is_readable", lambda x: False)
    leaves = inputs()
    out = nystrom_attention_varlen(*leaves, borders(LENGTHS), num_landmarks=M, landmarks="kmeans")
    assert_equal([out], [alone(*leaves, landmarks="kmeans")])


def test_scaling_by_the_batch_is_that_of_the_padded_batch():
    leaves = inputs()
    options = {"num_landmarks": M, "pinv_scaling": "batch"}
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded = [x.new_zeros(*mask.shape, 2, 6).masked_scatter(mask[..., None, None], x).transpose(1, 2) for x in leaves]
    expected = nystrom_attention(*padded, mask, **options).transpose(1, 2)[mask]
    assert_equal([nystrom_attention_varlen(*leaves, borders(LENGTHS), **options)], [expected])
    assert not torch.allclose(expected, alone(*leaves), atol=1e-6)


def test_gradients_are_right(way):
    lengths = [3, 11]
    leaves, weights = inputs(lengths), kernel()
    run = lambda *x: nystrom_attention_varlen(*x[:3], borders(lengths), num_landmarks=4, conv_weight=x[3])
    assert torch.autograd.gradcheck(run, [*leaves, weights], fast_mode=True)


def test_what_one_sequence_holds_changes_no_other(way):
    first, last = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    leaves = inputs()
    spoiled = [x.detach().clone() for x in leaves]
    for x in spoiled:
        x[first:last] = torch.nan
    clean, dirty = (
        nystrom_attention_varlen(*x, borders(LENGTHS), num_landmarks=M, conv_weight=kernel(), exact_below=20)
        for x in (leaves, spoiled)
    )
    others = torch.ones(len(clean), dtype=torch.bool)
    others[first:last] = False
    assert dirty[first:last].isnan().all()
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_within_two_percent_of_float32(way, dtype):
    half = inputs(dtype=dtype)
    found = with_gradients(nystrom_attention_varlen(*half, borders(LENGTHS), num_landmarks=M), *half)
    full = [x.detach().float().requires_grad_() for x in half]
    expected = with_gradients(nystrom_attention_varlen(*full, borders(LENGTHS), num_landmarks=M), *full)
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == dtype
        assert (x.float() - y).norm() <= 0.02 * y.norm()


def test_autocast_changes_nothing_for_float32(way):
    leaves = inputs(dtype=torch.float32)
    run = lambda: nystrom_attention_varlen(*leaves, borders(LENGTHS), num_landmarks=M)
    expected = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(), expected)


def test_nothing_of_n_by_m_elements_is_made_or_saved(way):
    lengths, m = [3000, 20, 1304], 64
    leaves = [x.detach().repeat(1, 1, 2)[..., :8].requires_grad_() for x in inputs(lengths, dtype=torch.float32)]
    saved = []
    keep = lambda x: saved.append(x.untyped_storage().nbytes() // x.element_size()) or x
    with Largest() as largest:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = nystrom_attention_varlen(*leaves, borders(lengths), num_landmarks=m, conv_weight=kernel().float())
        out.sum().backward()
    assert saved
    assert max(*saved, largest.elements) < sum(lengths) * 2 * m


def test_pseudoinverses_of_all_sequences_are_one_batch(monkeypatch):
    shapes, original = [], nystrom_core.iterative_pinv
    monkeypatch.setattr(nystrom_core, "iterative_pinv", lambda A, *args: shapes.append(A.shape) or original(A, *args))
    with without_native():  # whose threads need no batch
        nystrom_attention_varlen(*inputs(), borders(LENGTHS), num_landmarks=M)
    assert shapes == [(sum(length > M for length in LENGTHS), 2, M, M)]


def test_elsewhere_launches_do_not_grow_with_the_sequences_and_nothing_waits():
    counts = []
    for lengths in ([7, 505], LENGTHS, [9] * 40):
        leaves = [x.detach().to("meta").requires_grad_() for x in inputs(lengths)]
        weights = torch.empty(2, 5, dtype=torch.float64, device="meta").requires_grad_()
        with Kernels() as kernels:
            out = nystrom_attention_varlen(*leaves, borders(lengths).to("meta"), num_landmarks=M, conv_weight=weights)
            torch.autograd.grad(out, [*leaves, weights], out.detach())
        assert kernels.waiting == []
        counts.append(kernels.count)
    assert counts[0] == counts[1] == counts[2] < 370


@pytest.mark.slow
def test_compiles_as_one_graph_for_a_fixed_number_of_sequences():
    compiles = []

    def backend(graph, examples):
        compiles.append(graph)
        return graph.forward

    run = torch.compile(
        lambda *x: nystrom_attention_varlen(*x[:3], x[3], num_landmarks=M, conv_weight=x[4], exact_below=20),
        fullgraph=True,
        backend=backend,
        dynamic=False,
    )
    for lengths in ([5, 1, 40, 17], [20, 30, 8, 5], [2, 3, 57, 1]):
        leaves, weights = inputs(lengths), kernel()
        out = run(*leaves, borders(lengths), weights)
        expected = alone(*leaves, lengths, conv_weight=weights, exact_below=20)
        assert_equal(with_gradients(out, *leaves, weights), with_gradients(expected, *leaves, weights))
    assert len(compiles) == 1


def test_functional_gradients_are_those_of_backward():
    leaves = inputs()
    run = lambda *x: nystrom_attention_varlen(*x, borders(LENGTHS), num_landmarks=M).sin().sum()
    found = torch.func.grad(run, argnums=(0, 1, 2))(*(x.detach() for x in leaves))
    assert_equal(found, torch.autograd.grad(run(*leaves), leaves))


def test_wrong_options_say_what_is_allowed():
    query, key, value = inputs()
    with pytest.raises(ValueError, match="num_landmarks=0: must be at least 1"):
        nystrom_attention_varlen(query, key, value, borders(LENGTHS), num_landmarks=0)
    with pytest.raises(ValueError, match="is_causal=True: must be False"):
        nystrom_attention_varlen(query, key, value, borders(LENGTHS), is_causal=True)
    both = {"cu_seqlens_q": borders(LENGTHS), "cu_seqlens_k": borders(LENGTHS)}
    with pytest.raises(ValueError, match="conv_weight was given with cu_seqlens_q and cu_seqlens_k"):
        nystrom_attention_varlen(query, key, value, **both, conv_weight=kernel())
    run = torch.compile(nystrom_attention_varlen, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="landmarks='kmeans' in a compiled graph"):
        run(query, key, value, borders(LENGTHS), landmarks="kmeans")
