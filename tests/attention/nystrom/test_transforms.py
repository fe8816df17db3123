"""torch.compile, torch.export, torch.func.vmap, second derivatives: each works or is refused clearly."""

import pytest
import torch
from torch import nn

from nystromformer import NystromAttention, nystrom_attention


def tensors(b=2, h=2, n=150, d=16, **options):
    return [torch.randn(b, h, n, d, generator=torch.Generator().manual_seed(i), **options) for i in range(3)]


def some_mask(b, n):
    return torch.arange(n)[None] < torch.arange(n - b + 1, n + 1)[:, None] - 20


@pytest.mark.slow(seconds=7)
@pytest.mark.parametrize("landmarks, masked", [("segment_means", False), ("segment_means", True), ("kmeans", True)])
def test_compiles_as_one_graph_forward_and_backward(landmarks, masked):
    torch._dynamo.reset()
    compiled = torch.compile(nystrom_attention, fullgraph=True, backend="aot_eager")
    for n in (150, 20, 313):
        mask = some_mask(2, n) if masked else None
        kernel = torch.randn(2, 5, dtype=torch.float64)
        results = []
        for function in (nystrom_attention, compiled):
            # float64, so that rounding does not move a token between two clusters that are nearly as far
            inputs = [x.requires_grad_() for x in tensors(n=n, dtype=torch.float64)]
            for x, axis in zip((*inputs, mask), (2, 2, 2, 1), strict=True):
                if x is not None:
                    torch._dynamo.mark_dynamic(x, axis)
            out = function(*inputs, mask, num_landmarks=32, conv_weight=kernel, landmarks=landmarks)
            results.append([out, *torch.autograd.grad(out.sin().sum(), inputs)])
        for eager, graph in zip(*results, strict=True):
            torch.testing.assert_close(graph, eager, rtol=0, atol=1e-9)


@pytest.mark.slow(seconds=25)
def test_compiles_with_the_default_backend():
    torch._dynamo.reset()
    layer = NystromAttention(32, num_heads=2, num_landmarks=16)
    x, mask = torch.randn(2, 100, 32), some_mask(2, 100)
    expected = layer(x, mask=mask)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x, mask=mask), expected, rtol=1e-4, atol=1e-5)


class Operation(nn.Module):
    def forward(self, query, key, value, mask, kernel):
        return nystrom_attention(query, key, value, mask, num_landmarks=16, conv_weight=kernel)


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_exports_with_dynamic_batch_and_length(masked):
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=100_000)
    axes = {0: batch, 2: length}
    example = (*tensors(n=150), some_mask(2, 150) if masked else None, torch.randn(2, 5))
    mask_axes = {0: batch, 1: length} if masked else None
    program = torch.export.export(Operation(), example, dynamic_shapes=(axes, axes, axes, mask_axes, None))
    for b, n in [(2, 150), (1, 7), (3, 16), (5, 64), (1, 1), (2, 301)]:
        inputs = (*tensors(b=b, n=n), torch.rand(b, n) < 0.7 if masked else None, torch.randn(2, 5))
        torch.testing.assert_close(program.module()(*inputs), Operation()(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_exports_cross_attention():
    def shaped(n, s):
        return tensors(n=n)[0], *tensors(n=s)[1:]

    class Cross(nn.Module):
        def forward(self, query, key, value):
            return nystrom_attention(query, key, value, num_landmarks=16)

    queries, keys = torch.export.Dim("queries", min=1, max=9999), torch.export.Dim("keys", min=1, max=9999)
    program = torch.export.export(Cross(), shaped(50, 70), dynamic_shapes=({2: queries}, {2: keys}, {2: keys}))
    for n, s in [(50, 70), (3, 70), (70, 3), (100, 101)]:
        inputs = shaped(n, s)
        torch.testing.assert_close(program.module()(*inputs), Cross()(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("n", [50, 12], ids=["approximate", "exact"])
def test_vmap_equals_a_loop(n):
    stacked = [torch.stack([x, 2 * x]) for x in tensors(n=n, dtype=torch.float64)]
    kernels, mask = torch.randn(2, 2, 5, dtype=torch.float64), some_mask(2, 50)[:, -n:]
    run = lambda q, k, v, w: nystrom_attention(q, k, v, mask, num_landmarks=16, conv_weight=w)
    mapped = torch.func.vmap(run)(*stacked, kernels)
    looped = torch.stack([run(*(x[i] for x in stacked), kernels[i]) for i in range(2)])
    torch.testing.assert_close(mapped, looped)


def test_a_second_derivative_is_refused_clearly():
    inputs = [x.requires_grad_() for x in tensors()]
    out = nystrom_attention(*inputs, num_landmarks=16)
    (first,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative .* not implemented|once_differentiable"):
        first.sum().backward()
