"""`exact_below`: short examples are exact, long ones are as without it, and every promise of the contract holds."""

import pytest
import torch
from largest_tensor import Largest
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from nystromformer import NystromAttention, build_attention, nystrom_attention, nystrom_attention_weights
from nystromformer.attention import nystrom_local_attention, nystrom_local_attention_weights
from nystromformer.attention.native import library
from nystromformer.attention.nystrom import operation as nystrom_operation
from nystromformer.attention.nystrom_local import core
from nystromformer.attention.shared import common, varlen

BELOW = 24
SIZES = {
    nystrom_attention: {"num_landmarks": 8},
    nystrom_local_attention: {"num_landmarks": 8, "block_size": 4},
}
"""Small enough that `BELOW` tokens would be approximated."""
VALID = (24, 25, 60, 3, 0)
LENGTH = 70

every_operation = pytest.mark.parametrize("operation", list(SIZES), ids=lambda operation: operation.__name__)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(b=5, h=2, n=LENGTH, d=4, e=None, dtype=torch.float64):
    return [draw(b, h, n, width, seed=seed, dtype=dtype) for seed, width in enumerate((d, d, e or d))]


def scattered(valid=VALID, length=LENGTH):
    """A mask with so many valid tokens for each example, anywhere."""
    order = torch.rand(len(valid), length, generator=torch.Generator().manual_seed(1)).argsort(dim=1)
    return order < torch.tensor(valid)[:, None]


def run(operation, tensors, mask=None, **options):
    return operation(*tensors, mask, exact_below=BELOW, **SIZES[operation], **options)


def exact(tensors, mask):
    query, key, value = tensors
    bias = (mask | ~mask.any(1, keepdim=True))[:, None, None]
    out = scaled_dot_product_attention(query, key, value * mask[:, None, :, None], attn_mask=bias)
    return out * mask[:, None, :, None]


@every_operation
@pytest.mark.parametrize("e", [4, 3, 6], ids=lambda e: f"values of width {e}")
def test_examples_are_exact_by_their_own_valid_tokens_and_others_are_as_without(operation, e):
    tensors, mask = qkv(e=e), scattered()
    out, without = run(operation, tensors, mask), operation(*tensors, mask, **SIZES[operation])
    short = mask.sum(1) <= BELOW
    torch.testing.assert_close(out[short], exact(tensors, mask)[short], rtol=0, atol=1e-12)
    assert torch.equal(out[~short], without[~short])
    assert (without[0] - exact(tensors, mask)[0]).abs().max() > 1e-3  # it would have been approximated


@pytest.mark.parametrize("valid, exact, approximated", [((25, 60), 0, 1), ((24, 3, 0), 1, 0), (VALID, 1, 1)], ids=str)
def test_no_example_goes_both_ways_where_python_can_read_the_mask(monkeypatch, valid, exact, approximated):
    """Nor does a batch without short examples pay for them."""
    counts = {"exact": 0, "approximated": 0}

    def counted(name, function):
        def call(*arguments, **options):
            counts[name] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(common, "_exact_at_the_front", counted("exact", common._exact_at_the_front))
    monkeypatch.setattr(core, "_approximated", counted("approximated", core._approximated))
    run(nystrom_local_attention, qkv(b=len(valid)), scattered(valid))
    assert counts == {"exact": exact, "approximated": approximated}


@every_operation
@pytest.mark.parametrize("n, is_exact", [(BELOW, True), (BELOW + 1, False)])
def test_without_masks_the_length_decides(operation, n, is_exact):
    tensors = qkv(n=n)
    out = run(operation, tensors)
    assert torch.allclose(out, scaled_dot_product_attention(*tensors), atol=1e-9) is is_exact


@every_operation
def test_an_example_depends_neither_on_its_batch_nor_on_its_padding(operation):
    tensors, mask, kernel = qkv(), scattered(), draw(2, 5, seed=9)
    whole = run(operation, tensors, mask, conv_weight=kernel)
    for i in range(len(VALID)):
        alone = run(operation, [x[i : i + 1] for x in tensors], mask[i : i + 1], conv_weight=kernel)
        torch.testing.assert_close(alone, whole[i : i + 1], rtol=0, atol=1e-9)
    for front, back in [(0, 13), (21, 0), (5, 64)]:
        padded = [pad(x, (0, 0, front, back), value=float("nan")) for x in tensors]
        out = run(operation, padded, pad(mask, (front, back)), conv_weight=kernel)
        torch.testing.assert_close(out[:, :, front : front + LENGTH], whole, rtol=0, atol=1e-9)
    for i, valid in enumerate(VALID[:4]):  # nothing but the valid tokens, without a mask
        tokens = [x[i : i + 1, :, mask[i]] for x in tensors]
        torch.testing.assert_close(run(operation, tokens)[0], run(operation, tensors, mask)[i, :, mask[i]])
        assert tokens[0].shape[2] == valid


@every_operation
@pytest.mark.parametrize("content", [1e6, float("nan"), float("inf")])
def test_what_padding_holds_changes_nothing_forward_or_backward(operation, content):
    mask, results = scattered(), []
    for fill in (0.0, content):
        tensors = [torch.where(mask[:, None, :, None], x, fill).requires_grad_() for x in qkv()]
        out = run(operation, tensors, mask)
        results.append([out, *torch.autograd.grad(out.sin().sum(), tensors)])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
    assert (results[0][0].transpose(1, 2)[~mask] == 0).all()
    assert all((x[4] == 0).all() for x in results[0])  # the example without valid tokens


@every_operation
def test_a_broken_example_does_not_spoil_the_others(operation):
    tensors, mask = qkv(), scattered()
    broken = [x.clone() for x in tensors]
    for x in broken:
        x[[0, 2]] = float("nan")
    out, expected = run(operation, broken, mask), run(operation, tensors, mask)
    torch.testing.assert_close(out[[1, 3, 4]], expected[[1, 3, 4]], rtol=0, atol=1e-9)


@pytest.mark.slow
@every_operation
def test_gradients_are_right(operation):
    tensors = [x.requires_grad_() for x in qkv(b=3, h=1, n=14, d=2)]
    mask = scattered((5, 9, 13), 14)
    options = {nystrom_attention: {"num_landmarks": 3}, nystrom_local_attention: {"num_landmarks": 3, "block_size": 1}}
    attend = lambda *x: operation(*x, mask, exact_below=9, **options[operation])
    assert torch.autograd.gradcheck(attend, tensors)


@every_operation
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_within_two_percent_of_float32(operation, dtype):
    tensors, mask = qkv(d=32, dtype=dtype), scattered()
    results = []
    for cast in (dtype, torch.float32):
        inputs = [x.to(cast).requires_grad_() for x in tensors]
        out = run(operation, inputs, mask)
        results.append([out, *torch.autograd.grad(out, inputs, draw(*out.shape, seed=5, dtype=cast))])
    for half, full in zip(*results, strict=True):
        assert half.dtype == dtype
        assert (half.float() - full).norm() <= 0.02 * full.norm()


@every_operation
def test_no_matrix_of_pairs_of_tokens_is_made(operation):
    heads, n, d, e = 2, 1024, 8, 128
    inputs = [torch.randn(1, heads, n, d).requires_grad_() for _ in range(3)]
    mask = torch.arange(n)[None] < n - 100
    largest = []
    for below in (None, e):
        with Largest() as mode:
            operation(*inputs, mask, num_landmarks=32, exact_below=below).sum().backward()
        largest.append(mode.elements)
    assert largest[1] <= max(largest[0], heads * n * d) < heads * n * e


@pytest.mark.parametrize("way", ["in one call", "alone"])
def test_padded_examples_give_the_same_in_one_call_alone_and_together(way, monkeypatch):
    """On a CPU examples are computed on their valid tokens, by machine code or one by one: each goes one way only."""
    if way == "alone":
        monkeypatch.setattr(library, "_set", None)
        monkeypatch.setattr(varlen, "SMALLEST_EXAMPLE", 0)
    tensors = [x.requires_grad_() for x in qkv()]
    mask = torch.arange(LENGTH) < torch.tensor(VALID)[:, None]
    out, kernel = run(nystrom_attention, tensors, mask), draw(2, 5, seed=9)
    short = mask.sum(1) <= BELOW
    torch.testing.assert_close(out[short], exact(tensors, mask)[short], rtol=0, atol=1e-12)
    found = [out, *torch.autograd.grad(run(nystrom_attention, tensors, mask, conv_weight=kernel).sin().sum(), tensors)]
    monkeypatch.setattr(nystrom_operation, "is_readable", lambda mask: False)
    other = run(nystrom_attention, tensors, mask, conv_weight=kernel)
    expected = [run(nystrom_attention, tensors, mask), *torch.autograd.grad(other.sin().sum(), tensors)]
    for first, second in zip(found, expected, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=1e-9)


@every_operation
@pytest.mark.parametrize("n", [LENGTH, BELOW])
def test_only_one_way_is_taken_where_lengths_alone_decide(operation, n):
    """Unmasked input is surely long or surely short: then it costs what that alone costs."""
    tensors, counts = qkv(n=n), []
    alone = {"exact_below": None} if n > BELOW else {"num_landmarks": 100, "block_size": 100}
    alone = {name: value for name, value in alone.items() if name in ("exact_below", *SIZES[operation])}
    for options in ({"exact_below": BELOW}, alone):
        with Operations() as mode:
            operation(*tensors, **SIZES[operation] | options)
        counts.append(mode.count)
    assert counts[0] == counts[1]


class Operations(TorchDispatchMode):
    """How many operations are dispatched."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **kwargs or {})


def test_cross_attention_needs_few_queries_and_few_keys():
    query, (_, key, value) = draw(3, 2, 30, 4, seed=7), qkv(b=3)
    masks = {"query_mask": scattered((20, 30, 20), 30), "key_mask": scattered((20, 20, 60))}
    out = nystrom_attention(query, key, value, num_landmarks=8, exact_below=BELOW, **masks)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=masks["key_mask"][:, None, None])
    expected = expected * masks["query_mask"][:, None, :, None]
    torch.testing.assert_close(out[0], expected[0])
    assert all((out[i] - expected[i]).abs().max() > 1e-3 for i in (1, 2))


@pytest.mark.parametrize(
    "operation, weights",
    [(nystrom_attention, nystrom_attention_weights), (nystrom_local_attention, nystrom_local_attention_weights)],
    ids=["nystrom", "nystrom-local"],
)
@pytest.mark.parametrize("n", [LENGTH, BELOW])
def test_weights_are_those_of_the_output(operation, weights, n):
    (query, key, value), mask = qkv(n=n), scattered(VALID if n == LENGTH else (24, 10, 20, 3, 0), n)
    rows = weights(query, key, range(n), mask, exact_below=BELOW, **SIZES[operation])
    torch.testing.assert_close(rows @ (value * mask[:, None, :, None]), run(operation, (query, key, value), mask))


@pytest.mark.slow
@every_operation
def test_compiles_as_one_graph_forward_and_backward(operation):
    torch._dynamo.reset()
    compiled = torch.compile(operation, fullgraph=True, backend="aot_eager")
    mask, results = scattered(), []
    for function in (operation, compiled):
        inputs = [x.requires_grad_() for x in qkv()]
        out = function(*inputs, mask, exact_below=BELOW, **SIZES[operation])
        results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, rtol=0, atol=1e-9)


@pytest.mark.slow
@every_operation
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_exports_with_dynamic_batch_and_length(operation, masked):
    class Operation(nn.Module):
        def forward(self, query, key, value, mask):
            return run(operation, (query, key, value), mask)

    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=100_000)
    axes, mask_axes = {0: batch, 2: length}, {0: batch, 1: length} if masked else None
    example = (*qkv(), scattered() if masked else None)
    program = torch.export.export(Operation(), example, dynamic_shapes=(axes, axes, axes, mask_axes))
    for b, n in [(5, LENGTH), (1, 7), (3, BELOW), (2, BELOW + 1), (1, 1), (2, 201)]:
        inputs = (*qkv(b=b, n=n), torch.rand(b, n) < 0.4 if masked else None)
        torch.testing.assert_close(program.module()(*inputs), Operation()(*inputs), rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_equals_a_loop():
    stacked, mask = [torch.stack([x, 2 * x]) for x in qkv()], scattered()
    attend = lambda *x: run(nystrom_attention, x, mask)
    looped = torch.stack([attend(*(x[i] for x in stacked)) for i in range(2)])
    torch.testing.assert_close(torch.func.vmap(attend)(*stacked), looped)


@pytest.mark.parametrize("name", ["nystrom", "nystrom-local"])
def test_it_is_an_option_of_the_attentions(name):
    attention = build_attention(name, num_heads=2, head_dim=4, num_landmarks=8, exact_below=100, conv_kernel_size=None)
    assert attention.exact_up_to == 100
    tensors, mask = qkv(dtype=torch.float32), scattered()
    torch.testing.assert_close(attention(*tensors, mask), exact(tensors, mask))
    assert build_attention(name, num_heads=2, head_dim=4).options.exact_below is None


def test_it_is_an_option_of_the_layer():
    layer = NystromAttention(8, num_heads=2, num_landmarks=4, exact_below=LENGTH, conv_kernel_size=None).double()
    x, mask = draw(len(VALID), LENGTH, 8), scattered()
    tensors = [each(x).unflatten(2, (2, 4)).transpose(1, 2) for each in (layer.query, layer.key, layer.value)]
    expected = layer.output(exact(tensors, mask).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, mask=mask), expected)


@every_operation
def test_bad_values_are_refused(operation):
    with pytest.raises(ValueError, match="exact_below=0: must be at least 1; None leaves it"):
        operation(*qkv(), exact_below=0)
    with pytest.raises(TypeError, match="exact_below=2.5 is a float"):
        operation(*qkv(), exact_below=2.5)
