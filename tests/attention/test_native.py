"""Machine code of our own: right for every instruction set, size, layout and thread, and absent without a trace."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drawn import draw
from largest_tensor import saved_sizes

from nystromformer import build_attention, nystrom_attention, nystrom_attention_varlen
from nystromformer.attention import native
from nystromformer.attention.native import (
    exact_attention,
    library,
    pinv,
    pinv_gradient,
    skip,
    skip_kernel_gradient,
    thin_attention,
)
from nystromformer.attention.nystrom.pseudoinverse import iterative_pinv

pytestmark = pytest.mark.skipif(native.instructions().startswith("none"), reason=native.instructions())
SIZES = [(100, 7, 5, 3), (7, 100, 3, 5), (1, 1, 1, 1), (49, 130, 20, 40), (2100, 33, 64, 64), (33, 2100, 64, 64)]
"""Queries, keys, their width, that of values: few keys and few queries, more than an item of work, parts of vectors."""
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


def dense(query, key, value, bias, scale):
    logits = scale * query @ key.mT + bias
    return torch.softmax(logits, -1) @ value, torch.logsumexp(logits, -1)


def in_rows(x):
    """The layout of projections."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def with_gradients(function, inputs, upstream):
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    return [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_outputs_logsumexps_and_gradients_are_the_dense_ones(machine_code, sizes, dtype):
    n, s, d, e = sizes
    inputs = [in_rows(draw(2, 3, *shape, seed=i)) for i, shape in enumerate([(n, d), (s, d), (s, e)])]
    bias = draw(2, 1, 1, s, seed=4).masked_fill(torch.arange(s) % 5 == 1, -torch.inf)
    upstream = in_rows(draw(2, 3, n, e, seed=5)), draw(2, 3, n, seed=6)
    expected = with_gradients(lambda *x: dense(*x, bias, 0.3), inputs, upstream)
    inputs, upstream = [x.to(dtype) for x in inputs], [x.to(dtype) for x in upstream]
    found = with_gradients(lambda *x: thin_attention(*x, bias.to(dtype), 0.3), inputs, upstream)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=TOLERANCES[dtype] * theirs.abs().max().item())


def test_scattered_and_repeated_inputs_are_read_as_they_are(machine_code):
    query, key, value = (draw(2, 3, 20, 6, seed=i) for i in range(3))
    expected = dense(query, key, value, 0, 0.5)[0]
    scattered = [x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in (query, key, value)]
    torch.testing.assert_close(thin_attention(*scattered, None, 0.5)[0], expected)
    one_key = thin_attention(query, key[:, :, :1].expand(-1, -1, 20, -1), value, None, 0.5)[0]
    torch.testing.assert_close(one_key, value.mean(2, keepdim=True).expand_as(one_key))


@pytest.mark.parametrize("iterations", [4, 9], ids=["as symmetric", "as any"])
@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 40, 33), (1, 1, 5), (2, 64, 64)], ids=str)
def test_pseudoinverses_and_gradients_are_those_of_the_steps(machine_code, shape, iterations):
    A = torch.softmax(3 * draw(*shape), -1).requires_grad_()
    norms, grad = draw(shape[0], seed=1).abs() + 2, draw(shape[0], shape[2], shape[1], seed=2)
    first = Z = (A.mT / norms[:, None, None]).detach().requires_grad_()
    for _ in range(iterations):
        Y = A @ Z
        Z = 0.25 * (13 * Z - Z @ (15 * Y - Y @ (7 * Y - Y @ Y)))
    ours, steps = pinv(A.detach(), norms, iterations, True)
    torch.testing.assert_close(ours, Z)
    torch.testing.assert_close(pinv(A.detach(), norms, iterations, False)[0], ours, rtol=0, atol=0)
    grad_A, grad_first = torch.autograd.grad(Z, (A, first), grad)
    found, dots = pinv_gradient(grad, A.detach(), norms, steps)
    torch.testing.assert_close(found, grad_A + grad_first.mT / norms[:, None, None])
    torch.testing.assert_close(dots, (grad_first.mT * A).sum((1, 2)))


@pytest.mark.parametrize("spread", [0.1, 1, 10])
def test_six_steps_in_float32_leave_little_rounding(machine_code, spread):
    A = torch.softmax(spread * draw(24, 64, 64), -1)
    norms = A.sum(1).amax(1)
    ours = pinv(A.float(), norms.float(), 6, False)[0]
    with native.without_native():
        exact = iterative_pinv(A)
    error = torch.linalg.matrix_norm(ours - exact) / torch.linalg.matrix_norm(exact)
    assert error.max() < 3e-6


def results(name, threads, dtype=torch.float32, mask=None, batch=2):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        attention = build_attention(name, num_heads=3, head_dim=16, num_landmarks=16).to(dtype)
        leaves = [in_rows(draw(2, 3, 1500, 16, seed=i, dtype=dtype))[:batch].requires_grad_() for i in range(3)]
        out = attention(*leaves, mask)
        return [out, *torch.autograd.grad(out, [*leaves, *attention.parameters()], torch.ones_like(out).cumsum(2))]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["nystrom", "nystrom-local"])
def test_results_do_not_depend_on_threads_or_neighbors(name):
    """Bit by bit for threads, wherever only our own code runs on several; a batch changes what PyTorch's code does."""
    one, two = results(name, 1), results(name, 2)
    for first, second in zip(one, two, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5 * first.abs().max().item())
    alone = results(name, 1, batch=1)
    for first, second in zip(one[:4], alone[:4], strict=True):
        torch.testing.assert_close(first[:1], second, rtol=1e-5, atol=1e-5 * first.abs().max().item())


@pytest.mark.parametrize("few_keys", [True, False])
def test_threads_change_no_bit(few_keys):
    many, few = (in_rows(draw(2, 3, n, 20, seed=n, dtype=torch.float32)) for n in (5000, 40))
    query, key = (many, few) if few_keys else (few, many)
    upstream = (torch.ones_like(query).cumsum(-1),)
    found = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(with_gradients(lambda *x: thin_attention(*x, None, 0.2)[:1], (query, key, key), upstream))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", ["nystrom", "nystrom-local"])
def test_both_paths_give_the_same(name):
    mask = torch.arange(1500) < torch.tensor([[1500], [900]])
    ours = results(name, 1, torch.float64, mask)
    with native.without_native():
        theirs = results(name, 1, torch.float64, mask)
    for first, second in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-9 * max(1, second.abs().max().item()))


def test_a_wrong_number_stays_where_it_belongs():
    query, key, value = (draw(1, 2, 300, 8, seed=i, dtype=torch.float32) for i in range(3))
    query[0, 0, 7] = torch.nan
    out = thin_attention(query, key[:, :, :16], value[:, :, :16], None, 0.3)[0]
    assert out[0, 0, 7].isnan().all()
    assert out.isnan().sum() == 8
    value[0, 1, 100] = torch.inf
    out = skip(value, draw(2, 9, seed=4, dtype=torch.float32))
    assert (~out.isfinite()).any(3)[0, 1].nonzero().flatten().tolist() == list(range(96, 105))
    assert out[0, 0].isfinite().all()


@pytest.mark.parametrize(
    "sizes",
    [(700, 16, 16, 32, 9), (133, 5, 7, 20, 3), (300, 16, 8, 40, 1), (2500, 8, 16, 9, 3), (4200, 8, 8, 7, 5)],
    ids=str,  # the last but one is divided among items of work forward alone, the last one both ways
)
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_the_whole_attention_and_its_convolution_are_those_of_its_parts(machine_code, dtype, sizes):
    n, d, e, m, taps = sizes
    inputs = [in_rows(draw(2, 3, n, width, seed=i)) for i, width in enumerate((d, d, e))]
    inputs.append(draw(3, taps, seed=3))
    upstream = (in_rows(draw(2, 3, n, e, seed=4)),)
    parts = lambda *x: (nystrom_attention(*x[:3], num_landmarks=m, conv_weight=x[3]),)
    with native.without_native():
        expected = with_gradients(parts, inputs, upstream)
    found = with_gradients(parts, [x.to(dtype) for x in inputs], [x.to(dtype) for x in upstream])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=TOLERANCES[dtype] * theirs.abs().max().item())


LENGTHS = [900, 0, 16, 249, 1, 2500, 17]
"""Nothing, exact up to 16 landmarks, just above, head by head, and divided among items of work."""


def mask_of(lengths, firsts, n):
    place = torch.arange(n)
    return torch.stack(
        [(first <= place) & (place < first + length) for length, first in zip(lengths, firsts, strict=True)]
    )


@pytest.mark.parametrize("layout", ["projections", "heads first"])
@pytest.mark.parametrize("firsts", [[0] * 7, [5, 9, 0, 2600 - 249, 1, 100, 2000]], ids=["right padding", "both sides"])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("exact_below", [None, 250])
def test_sequences_in_padded_batches_are_those_of_the_masked_batch(machine_code, exact_below, dtype, firsts, layout):
    mask = mask_of(LENGTHS, firsts, 2600)
    order = in_rows if layout == "projections" else torch.Tensor.contiguous
    inputs = [order(draw(7, 2, 2600, width, seed=i)) for i, width in enumerate((8, 8, 5))] + [draw(2, 9, seed=3)]
    upstream = (draw(7, 2, 2600, 5, seed=4),)
    options = {"num_landmarks": 16, "exact_below": exact_below}
    attend = lambda *x: (nystrom_attention(*x[:3], mask, conv_weight=x[3], **options),)
    with native.without_native():
        expected = with_gradients(attend, inputs, upstream)
    spoiled = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in inputs[:3]] + inputs[3:]
    found = with_gradients(attend, [x.to(dtype) for x in spoiled], [x.to(dtype) for x in upstream])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=TOLERANCES[dtype] * theirs.abs().max().item())
    for rows in found[:4]:
        assert (rows.transpose(1, 2)[~mask] == 0).all()


def test_sequences_give_the_same_bits_alone_packed_and_padded_on_any_number_of_threads(machine_code):
    lengths = [length for length in LENGTHS if length]
    mask = mask_of(lengths, range(len(lengths)), 2600)
    inputs = [in_rows(draw(6, 2, 2600, 8, seed=i, dtype=torch.float32)) for i in range(3)]
    packed = [x.transpose(1, 2)[mask] for x in inputs]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        attend = lambda *x: (nystrom_attention(*x, mask, num_landmarks=16),)
        padded = with_gradients(attend, inputs, (torch.ones_like(inputs[0]),))
        attend = lambda *x: (nystrom_attention_varlen(*x, borders, num_landmarks=16),)
        found.append([x.transpose(1, 2)[mask] for x in padded])
        found.append(with_gradients(attend, packed, (torch.ones_like(packed[0]),)))
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))
    own = slice(borders[4], borders[5])
    alone = nystrom_attention(*(x[own].transpose(0, 1)[None] for x in packed), num_landmarks=16)
    assert torch.equal(alone[0].transpose(0, 1), found[0][0][own])


def test_exact_sequences_keep_no_memory_for_landmarks(machine_code):
    x = draw(40 * 200, 2, 8, dtype=torch.float32)
    borders = torch.arange(0, 40 * 200 + 1, 40)
    with saved_sizes() as saved:
        nystrom_attention_varlen(x.requires_grad_(), x, x, borders, num_landmarks=64)
    assert max(saved) == x.numel()


@pytest.mark.parametrize("sizes", [(100, 6, 9), (33, 16, 33), (2, 3, 7), (1100, 64, 5)], ids=str)
def test_convolutions_and_their_gradients_are_those_of_the_definition(machine_code, sizes):
    n, e, taps = sizes
    value, kernel, grad = draw(2, 3, n, e), draw(3, taps, seed=1), draw(2, 3, n, e, seed=2)
    windows = torch.nn.functional.pad(value, (0, 0, taps // 2, taps // 2)).unfold(2, taps, 1)  # (b h n e k)
    torch.testing.assert_close(skip(value, kernel), torch.einsum("bhnek, hk -> bhne", windows, kernel))
    torch.testing.assert_close(
        skip_kernel_gradient(grad, value, taps), torch.einsum("bhnek, bhne -> hk", windows, grad)
    )


def splitmix64(seed, count):
    """The first numbers of the generator, written from its definition."""
    for k in range(1, count + 1):
        z = (seed + k * 0x9E3779B97F4A7C15) % (1 << 64)
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
        yield z ^ (z >> 31)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("seed", [0, 7, -(1 << 63)])
def test_dropout_keeps_what_its_generator_says(machine_code, seed, dtype):
    x = draw(101, 3, dtype=dtype)
    words = torch.tensor([z - (z >> 63 << 64) for z in splitmix64(seed, 76)])
    kept = words.view(torch.int16)[:303].view(101, 3) >= -(1 << 14)
    factor = 4 / 3  # for what is kept of three quarters
    out = torch.ops.nystromformer.dropout(x, 1 << 14, seed)
    assert torch.equal(out, torch.where(kept, x * torch.tensor(factor, dtype=dtype), 0))
    scattered = torch.ops.nystromformer.dropout(x.mT, 1 << 14, seed)  # places are those of its rows, one by one
    assert torch.equal(scattered == 0, ~kept.view(3, 101))
    assert torch.equal(x.mT * torch.tensor(factor, dtype=dtype) * (scattered != 0), scattered)


def kept_weights(query, key, dropout, scale, seed, spans=None):
    """What each weight of `exact_attention` is multiplied with, told by values of which each has a place of its own."""
    places = torch.eye(key.shape[2], dtype=query.dtype).expand(*key.shape[:3], -1)
    torch.manual_seed(seed)
    found = exact_attention(query, key, places.contiguous(), scale, dropout, spans)
    return (found / torch.softmax(scale * query @ key.mT, -1)).detach()


SIZES_EXACT = [(100, 100, 5, 5), (49, 130, 20, 40), (130, 600, 20, 40), (2100, 77, 8, 8), (5, 1, 3, 3)]
"""Queries, keys and their widths: one block of keys, several, several items of work, one key."""


@pytest.mark.parametrize("sizes", SIZES_EXACT, ids=str)
def test_exact_attention_with_dropout_multiplies_weights_by_what_is_kept(machine_code, sizes):
    n, s, d, e = sizes
    inputs = [in_rows(draw(2, 3, *shape, seed=i)) for i, shape in enumerate([(n, d), (s, d), (s, e)])]
    factors = kept_weights(*inputs[:2], 0.25, 0.3, seed=7)
    kept = factors > 0.5
    torch.testing.assert_close(factors, kept.double() * 4 / 3, rtol=0, atol=1e-9)
    upstream = [in_rows(draw(2, 3, n, e, seed=5))]

    def ours(*x):
        torch.manual_seed(7)
        return [exact_attention(*x, 0.3, 0.25)]

    expected = with_gradients(lambda q, k, v: [torch.softmax(0.3 * q @ k.mT, -1) * factors @ v], inputs, upstream)
    for found, wanted in zip(with_gradients(ours, inputs, upstream), expected, strict=True):
        # with one key, gradients of queries and keys are differences of equal numbers
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11 * max(wanted.abs().max().item(), 1e-3))


@pytest.mark.parametrize("steep", [-40.0, 40.0])
def test_exact_attention_follows_logits_from_one_block_of_keys_to_the_next(machine_code, steep):
    query, value = in_rows(draw(1, 2, 60, 8).abs()), in_rows(draw(1, 2, 600, 8, seed=2))
    key = in_rows(draw(1, 2, 600, 8, seed=1) + steep * torch.linspace(-1, 1, 600)[:, None])  # logits up to ±1,000 or so
    upstream = [in_rows(draw(1, 2, 60, 8, seed=5))]
    attentions = (
        lambda *x: [exact_attention(*x, 1.0, 0.0)],
        lambda q, k, v: [torch.softmax(q @ k.mT, -1) @ v],
    )
    found, expected = (with_gradients(attention, [query, key, value], upstream) for attention in attentions)
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-11 * wanted.abs().max().item())


def test_weights_are_dropped_independently_with_the_probability_that_was_asked_for(machine_code):
    query, key = draw(2, 2, 300, 4), draw(2, 2, 300, 4, seed=1)
    kept = (kept_weights(query, key, 0.1, 0.5, seed=3) > 0.5).double()  # (b h n s)
    assert abs(kept.mean() - 0.9) < 5 * (0.09 / kept.numel()) ** 0.5
    centered = (kept - 0.9) / 0.3
    # rows, columns, heads and examples next to each other: means of as many products of independent numbers
    shifted = [(centered[..., 1:], centered[..., :-1]), (centered[..., 1:, :], centered[..., :-1, :])]
    for first, second in [*shifted, tuple(centered.unbind(0)), tuple(centered.unbind(1))]:
        assert (first * second).mean().abs() < 5 / first.numel() ** 0.5
    assert not torch.equal(kept_weights(query, key, 0.1, 0.5, seed=4) > 0.5, kept == 1)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_exact_attention_of_spans_is_that_of_each_sequence_alone(machine_code, dropout):
    spans = [(2, 2077), (50, 50), (700, 800)]  # the first is more than an item of work
    place = torch.arange(2100)
    inside = torch.stack([(place >= first) & (place < after) for first, after in spans])[:, None, :, None]  # (b 1 n 1)
    inputs = [in_rows(draw(3, 1, 2100, 64, seed=i)) for i in range(3)]
    unknown = [x.masked_fill(~inside, torch.nan) for x in inputs]  # which no one may look at
    factors = torch.ones(())
    if dropout:
        factors = (kept_weights(*inputs[:2], dropout, 0.1, seed=1, spans=spans) > 0).double() / 0.75

    def ours(*x):
        torch.manual_seed(1)
        return [exact_attention(*x, 0.1, dropout, spans)]

    def alone(query, key, value):
        weights = torch.softmax((0.1 * query @ key.mT).masked_fill(~inside.mT, -1e300), -1)
        return [inside * (weights * factors @ value)]

    upstream = [in_rows(draw(3, 1, 2100, 64, seed=5))]
    expected = with_gradients(alone, inputs, upstream)
    for found, wanted in zip(with_gradients(ours, unknown, upstream), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-11 * wanted.abs().max().item())


def run(code, **environment):
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_a_forked_process_computes_the_same():
    code = """
import os, torch
from nystromformer import nystrom_attention
torch.set_num_threads(2)
x = torch.randn(1, 4, 3000, 16)
first = nystrom_attention(x, x, x, num_landmarks=16)
torch.set_num_threads(2)
child = os.fork()
if child == 0:
    from nystromformer.attention.native import thin_attention
    out = thin_attention(x, x[:, :, :16], x[:, :, :16], None, 0.25)[0]
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    os._exit(0 if out.isfinite().all() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code, OMP_NUM_THREADS="2") == "0"


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment, said",
    [({"NYSTROMFORMER_NATIVE": "0"}, "none: NYSTROMFORMER_NATIVE=0 in the environment"),
     ({"ATEN_CPU_CAPABILITY": "default", "NYSTROMFORMER_NATIVE": "1"}, "baseline")],
)  # fmt: skip
def test_the_environment_chooses(environment, said):
    code = """
import torch
from nystromformer import nystrom_attention
from nystromformer.attention.native import instructions
x = torch.randn(1, 2, 100, 8, requires_grad=True)
nystrom_attention(x, x, x, num_landmarks=8).sum().backward()
assert x.grad.isfinite().all()
print(instructions())
"""
    assert run(code, **environment) == said


def test_what_machine_code_can_not_take_goes_the_other_way():
    x = draw(3)
    assert native.runs_native(x, x)
    assert not native.runs_native(x.half())
    assert not native.runs_native(x, x.float())
    assert not native.runs_native(x.to("meta"))
    assert not torch.func.vmap(lambda x: torch.tensor(native.runs_native(x)))(x).any()


@pytest.mark.slow
def test_a_compiled_graph_holds_the_operators():
    torch._dynamo.reset()
    inputs = [draw(1, 2, 200, 8, seed=i, dtype=torch.float32) for i in range(3)]
    function = lambda *x: nystrom_attention(*x, num_landmarks=16)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    upstream = torch.ones_like(inputs[0])
    eager, graph = (with_gradients(lambda *x, f=f: (f(*x),), inputs, upstream) for f in (function, compiled))
    for first, second in zip(eager, graph, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not LARGE_PAGES.exists(), reason="this system has no large pages to be asked for")
def test_large_results_ask_for_large_pages():
    """The system notes the request, as `hg`, with the memory that it is for."""
    tensor = torch.empty(48 << 20, dtype=torch.uint8)
    assert library.large_pages(tensor) is tensor
    middle, inside = tensor.data_ptr() + tensor.numel() // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            begin, end = (int(edge, 16) for edge in line.split()[0].split("-"))
            inside = begin <= middle < end
        if inside and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    pytest.fail("the memory is nowhere")
