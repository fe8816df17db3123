"""`nystrom_local_attention`: memory, torch.compile, torch.export, second derivatives and bad input."""

import pytest
import torch
from largest_tensor import Largest
from torch import nn

from nystromformer import build_attention
from nystromformer.attention import nystrom_local_attention
from nystromformer.attention.nystrom_local import near_field
from nystromformer.attention.shared import partial_softmax

SIZES = {"num_landmarks": 16, "heavy_keys": 4, "block_size": 8, "chosen_blocks": 2, "core_rows": 16}
Q = torch.randn(2, 4, 10, 8)
MASK = torch.ones(2, 10, dtype=torch.bool)


def tensors(b=2, h=2, n=150, d=16):
    return [torch.randn(b, h, n, d, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def holes(b, n):
    return torch.rand(b, n, generator=torch.Generator().manual_seed(n)) < 0.7


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_memory_is_what_the_docstring_says(fused, masked, monkeypatch):
    if not fused:
        monkeypatch.setattr(partial_softmax, "FUSED_DEVICES", ())
    heads, n, d, m, s = 2, 4096, 8, 64, 16
    inputs = [torch.randn(1, heads, n, d).requires_grad_() for _ in range(3)]
    mask = torch.arange(n)[None] < n - 100 if masked else None
    saved = []

    def keep(x):
        saved.append(x.untyped_storage().nbytes() // x.element_size())
        return x

    with Largest() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = nystrom_local_attention(*inputs, mask, num_landmarks=m, block_size=s, chosen_blocks=3)
    with Largest() as backward:
        out.sum().backward()
    tokens = heads * (n + 2 * s) * d  # a query, key or value with its margins
    repeated = heads * n * max(3 * d, m * d // s)  # what the keys of all blocks hold, near or far
    weights = heads * n * max(3 * s, m)
    compared = heads * (n // s) * near_field.MOST_CANDIDATES  # blocks of queries with blocks of keys
    assert max(saved) <= tokens
    # with the portable kernel, matrix products copy the keys of all blocks
    assert forward.elements <= (max(tokens, compared) if fused else max(repeated, weights))
    assert backward.elements <= (tokens if fused else weights)


@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize(
    "masked, backend",
    [(False, "aot_eager"), (True, "aot_eager_decomp_partition")],
    ids=["unmasked", "masked and taken apart"],
)
def test_compiles_as_one_graph_for_all_lengths_forward_and_backward(masked, backend):
    """The second with its operations taken apart as for the default backend; that this writes code for them is tried
    with `nystrom`."""
    torch._dynamo.reset()
    compiled = torch.compile(nystrom_local_attention, fullgraph=True, backend=backend)
    for n in (150, 313):
        mask = holes(2, n) if masked else None
        results = []
        for function in (nystrom_local_attention, compiled):
            inputs = [x.double().requires_grad_() for x in tensors(n=n)]
            for x, axis in zip((*inputs, mask), (2, 2, 2, 1), strict=True):
                if x is not None:
                    torch._dynamo.mark_dynamic(x, axis)
            with torch.compiler.set_stance("default" if n == 150 else "fail_on_recompile"):
                out = function(*inputs, mask, conv_weight=torch.ones(2, 5, dtype=torch.double), **SIZES)
            results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager, rtol=1e-7, atol=1e-8)


class Operation(nn.Module):
    def forward(self, query, key, value, mask):
        return nystrom_local_attention(query, key, value, mask, **SIZES)


@pytest.mark.slow(seconds=8)
def test_exports_with_dynamic_batch_and_length():
    """With a mask and chosen blocks; without both: test_exact_below.py. As ONNX: tests/models/test_onnx.py."""
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=100_000)
    axes, mask_axes = {0: batch, 2: length}, {0: batch, 1: length}
    example = (*tensors(), holes(2, 150))
    program = torch.export.export(Operation(), example, dynamic_shapes=(axes, axes, axes, mask_axes))
    for b, n in [(2, 150), (1, 7), (3, 16), (5, 64), (1, 1), (2, 301)]:
        inputs = (*tensors(b=b, n=n), holes(b, n))
        torch.testing.assert_close(program.module()(*inputs), Operation()(*inputs), rtol=1e-4, atol=1e-5)


def test_a_second_derivative_is_refused_clearly():
    inputs = [x.requires_grad_() for x in tensors()]
    (first,) = torch.autograd.grad(Operation()(*inputs, None).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        first.sum().backward()


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"query": Q[0]}, ValueError, r"query has shape \(4, 10, 8\): must have 4 dimensions.*view"),
        ({"key": Q.numpy()}, TypeError, r"key is a ndarray: must be a torch.Tensor"),
        ({"key": Q.double()}, TypeError, r"key is torch.float64, query is torch.float32: must be equal"),
        ({"query": Q[:, :, :6]}, ValueError, r"6 queries and 10 keys: must be as many.*use nystrom_attention"),
        ({"mask": MASK.long()}, TypeError, r"mask has dtype torch.int64: must be torch.bool.*mask.bool\(\)"),
        ({"mask": MASK[:, :5]}, ValueError, r"mask has shape \(2, 5\): must be \(2, 10\)"),
        ({"conv_weight": torch.ones(4, 4)}, ValueError, r"kernel size=4: must be odd.*use 3 or 5"),
        ({"num_landmarks": 0}, ValueError, r"num_landmarks=0: must be at least 1"),
        ({"num_landmarks": 2.5}, TypeError, r"num_landmarks=2.5 is a float: must be a whole number"),
        ({"heavy_keys": -1}, ValueError, r"heavy_keys=-1: must be at least 0"),
        ({"heavy_keys": 64}, ValueError, r"heavy_keys=64 with num_landmarks=64: .*fewer; a quarter is usual"),
        ({"block_size": 0}, ValueError, r"block_size=0: must be at least 1"),
        ({"core_rows": 0}, ValueError, r"core_rows=0: must be at least 1"),
        ({"ridge": 0.0}, ValueError, r"ridge=0.0: must be finite and at least 0.0001; 0.01 is usual"),
        ({"ridge": float("nan")}, ValueError, r"ridge=nan: must be finite"),
        ({"ridge": "0.01"}, TypeError, r"ridge='0.01' is a str: must be a number"),
        ({"scale": float("inf")}, ValueError, r"scale=inf: must be finite"),
        ({"is_causal": True}, ValueError, r"is_causal=True: must be False.*scaled_dot_product_attention"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bad_input_to_the_operation(arguments, error, message):
    with pytest.raises(error, match=message):
        nystrom_local_attention(**({"query": Q, "key": Q, "value": Q} | arguments))


def test_bad_options_of_the_module():
    with pytest.raises(ValueError, match=r"conv_kernel_size=4: must be odd"):
        build_attention("nystrom-local", num_heads=2, head_dim=4, conv_kernel_size=4)
    with pytest.raises(ValueError, match=r"option 'blocksize'.*Did you mean 'block_size'\?"):
        build_attention("nystrom-local-32", num_heads=2, head_dim=4, blocksize=4)
