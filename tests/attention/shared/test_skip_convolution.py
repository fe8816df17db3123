from importlib import import_module

import oracles
import pytest
import torch

from nystromformer.attention import SkipConvolution, skip_convolution

skip_convolution_module = import_module("nystromformer.attention.shared.skip_convolution")


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("n", [1, 2, 17, 64, 65, 200])
@pytest.mark.parametrize("k", [1, 3, 33, 65])
def test_equals_the_built_in_convolution_and_its_gradients(n, k):
    value, kernel = draw(2, 3, n, 4).requires_grad_(), draw(3, 1, k, 1).requires_grad_()
    ours = skip_convolution(value, kernel)
    theirs = torch.nn.functional.conv2d(value, kernel, padding=(k // 2, 0), groups=3)
    torch.testing.assert_close(ours, theirs)
    upstream = draw(2, 3, n, 4)
    torch.testing.assert_close(*(torch.autograd.grad(out, (value, kernel), upstream) for out in (ours, theirs)))


@pytest.mark.parametrize("n", [1, 33, 64, 200])
def test_both_ways_to_the_kernels_gradient_agree(n):
    grad, value = draw(2, 3, n, 4), draw(2, 3, n, 4) + 1
    ways = (skip_convolution_module._pairs_one_by_one, skip_convolution_module._pairs_at_once)
    torch.testing.assert_close(*(pairs(grad, value, 33) for pairs in ways))


def test_vmap_over_values_kernels_or_both_equals_a_loop():
    values, kernels = draw(3, 2, 2, 40, 4), draw(3, 2, 5)
    run = torch.func.grad(lambda v, w: skip_convolution(v, w).square().sum(), argnums=(0, 1))
    for dims in [(0, 0), (0, None), (None, 0)]:
        arguments = [x if dim == 0 else x[0] for x, dim in zip((values, kernels), dims, strict=True)]
        mapped = torch.func.vmap(run, in_dims=dims)(*arguments)
        looped = [
            run(*(x[i] if dim == 0 else x[0] for x, dim in zip((values, kernels), dims, strict=True))) for i in range(3)
        ]
        for all_at_once, one_by_one in zip(mapped, zip(*looped, strict=True), strict=True):
            torch.testing.assert_close(all_at_once, torch.stack(one_by_one))


def test_equals_a_dense_banded_matrix():
    value, kernel = draw(1, 2, 20, 3), draw(2, 5)
    for h in range(2):
        torch.testing.assert_close(skip_convolution(value, kernel)[0, h], oracles.convolved(value[0, h], kernel[h]))


def test_gradients_of_first_and_second_order_are_right():
    value, kernel = draw(2, 2, 7, 2).requires_grad_(), draw(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(skip_convolution, (value, kernel))
    assert torch.autograd.gradgradcheck(skip_convolution, (value, kernel))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_close_to_float32(dtype):
    value, kernel = draw(2, 3, 100, 16, dtype=dtype).requires_grad_(), draw(3, 33, dtype=dtype).requires_grad_()
    full = [x.detach().float().requires_grad_() for x in (value, kernel)]
    results = []
    for inputs in ((value, kernel), full):
        out = skip_convolution(*inputs)
        results.append((out, *torch.autograd.grad(out.sum(), inputs)))
    for half, expected in zip(*results, strict=True):
        assert half.dtype == dtype
        assert (half.float() - expected).norm() < 0.01 * expected.norm()


def test_result_has_the_layout_that_projections_read():
    out = skip_convolution(draw(2, 3, 10, 4), draw(3, 5))
    assert out.transpose(1, 2).is_contiguous()


def test_module_has_the_weight_of_published_checkpoints():
    module = SkipConvolution(num_heads=3, kernel_size=5)
    assert {name: tuple(x.shape) for name, x in module.state_dict().items()} == {"weight": (3, 1, 5, 1)}
    value = draw(1, 3, 9, 2, dtype=torch.float32)
    torch.testing.assert_close(module(value), skip_convolution(value, module.weight[:, 0, :, 0]))
    with pytest.raises(ValueError, match="kernel_size=4: must be odd"):
        SkipConvolution(3, 4)
