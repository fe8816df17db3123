"""What `torch.library.opcheck` asks of custom operators, asked of every custom autograd function of the attentions.

Each leaves its inputs as they are, returns nothing that shares their memory (but for declared views), says the right
shapes and dtypes for tensors without numbers, has right gradients, refuses forward mode, and gives the same in
a compiled graph.
"""

import contextlib
import importlib
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

import nystromformer.attention
from nystromformer.attention import nystrom_attention, nystrom_local_attention, standard_attention
from nystromformer.attention.longformer import Windows
from nystromformer.attention.native import instructions, without_native
from nystromformer.attention.nystrom.pseudoinverse import iterative_pinv
from nystromformer.attention.nystrom_local.near_field import chosen_part
from nystromformer.attention.nystrom_local.parts import ChosenBlocks, TokenBlocks, token_blocks
from nystromformer.attention.shared.partial_softmax import attention_with_lse, shared_part, window_part
from nystromformer.attention.shared.skip_convolution import skip_convolution


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bias_for(query: Tensor, *shape: int) -> Tensor:
    return torch.arange(math.prod(shape), dtype=query.dtype, device=query.device).sin().view(shape)


def two_of_four_blocks(device: torch.device) -> tuple[ChosenBlocks, TokenBlocks]:
    """For each of four blocks of four tokens, in two heads."""
    index = torch.tensor([[2, 3], [3, 0], [0, 1], [1, 0]], device=device).expand(2, 4, 2)
    return ChosenBlocks(index, index != 3), token_blocks(torch.empty(1, 2, 16, 1, device=device), None, size=4)


@dataclass(frozen=True)
class Case:
    """A function around one or more custom ones, and inputs that have gradients."""

    uses: set[str]
    run: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    gives_views: bool = False


CASES = {
    "a part of a softmax": Case(
        {"_SoftmaxPart", "_FewQueries"},
        lambda q, k, v: attention_with_lse(q, k, v, bias_for(q, 2, 3, 1, 7), scale=0.3),
        (draw(2, 3, 5, 4), draw(2, 3, 7, 4, seed=1), draw(2, 3, 7, 4, seed=2)),
    ),
    "shared keys": Case(
        {"_BlockwisePart", "_FewKeys"},
        lambda q, k, v: shared_part(q, k, v, bias_for(q, 3, 2, 1, 6), scale=0.3),
        (draw(3, 2, 4, 5), draw(2, 6, 5, seed=1), draw(2, 6, 5, seed=2)),
    ),
    "windows of keys": Case(
        {"_BlockwisePart", "_FewQueries"},
        lambda q, k, v: window_part(q, k, v, bias_for(q, 3, 2, 1, 12), scale=0.3, block=4),
        (draw(3, 2, 4, 5), draw(20, 2, 5, seed=1), draw(20, 2, 5, seed=2)),
    ),
    "chosen blocks of keys": Case(
        {"_GatheredPart"},
        lambda q, k, v: chosen_part(q, k, v, bias_for(q, 2, 16), *two_of_four_blocks(q.device), scale=0.3),
        (draw(4, 2, 4, 5), draw(16, 2, 5, seed=1), draw(16, 2, 5, seed=2)),
    ),
    "exact attention": Case(
        {"_Exact"}, standard_attention, (draw(2, 3, 9, 4), draw(2, 3, 7, 4, seed=1), draw(2, 3, 7, 5, seed=2))
    ),
    "Nyström attention": Case(
        {"_Whole"},
        lambda q, k, v, w: nystrom_attention(q, k, v, num_landmarks=4, conv_weight=w),
        (draw(2, 2, 9, 3), draw(2, 2, 9, 3, seed=1), draw(2, 2, 9, 5, seed=2), draw(2, 3, seed=3)),
    ),
    "Nyström attention with an exact near field": Case(
        {"_Far", "_Fields", "_Local", "_Near", "_Ridge"},
        lambda q, k, v: nystrom_local_attention(q, k, v, num_landmarks=4, block_size=2, core_rows=5),
        (draw(1, 2, 13, 3), draw(1, 2, 13, 3, seed=1), draw(1, 2, 13, 5, seed=2)),
    ),
    "slices": Case(
        {"Windows"}, lambda x: Windows.apply(x, [(0, 3), (1, 5), (4, 6)]), (draw(2, 2, 6, 3),), gives_views=True
    ),
    "pseudoinverse": Case({"_IterativePinv"}, lambda A: iterative_pinv(torch.softmax(A, -1), 3), (draw(2, 3, 5, 5),)),
    "convolution": Case(
        {"_SkipConvolution"}, skip_convolution, (draw(2, 3, 14, 4), draw(3, 5, seed=1))
    ),
}  # fmt: skip


@pytest.fixture(params=["native", "PyTorch"], autouse=True)
def path(request):
    """Both ways to compute the same, where this machine has both."""
    if request.param == "native" and instructions().startswith("none"):
        pytest.skip(instructions())
    with without_native() if request.param == "PyTorch" else contextlib.nullcontext():
        yield


every_case = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))


def custom_functions() -> set[str]:
    """The names of all custom functions in the folder."""
    found = set()
    folder = nystromformer.attention
    for module in pkgutil.walk_packages(folder.__path__, f"{folder.__name__}."):
        if module.name.endswith("._kernels"):  # the library, which only looks like a module of Python's
            continue
        members = vars(importlib.import_module(module.name)).values()
        found |= {x.__name__ for x in members if isinstance(x, type) and issubclass(x, Function) and x is not Function}
    return found


def outputs_and_gradients(run: Callable, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = [x for x in tree_leaves(run(*leaves)) if x.requires_grad]
    upstream = [torch.ones_like(x) if x.is_meta else draw(*x.shape, seed=5) for x in outputs]
    return outputs, torch.autograd.grad(outputs, leaves, upstream)


def test_every_custom_function_has_a_case():
    assert set.union(*(case.uses for case in CASES.values())) == custom_functions()


@every_case
def test_inputs_are_left_as_they_are_and_outputs_have_memory_of_their_own(case):
    copies = [x.clone() for x in case.inputs]
    memories = {x.untyped_storage().data_ptr() for x in case.inputs}
    outputs = tree_leaves(case.run(*case.inputs))
    assert all(torch.equal(x, copy) for x, copy in zip(case.inputs, copies, strict=True))
    assert any(x.untyped_storage().data_ptr() in memories for x in outputs) == case.gives_views


@every_case
def test_tensors_without_numbers_give_the_same_shapes(case):
    real, meta = (
        outputs_and_gradients(case.run, tuple(x.to(device) for x in case.inputs)) for device in ("cpu", "meta")
    )
    for first, second in zip(tree_leaves(real), tree_leaves(meta), strict=True):
        assert second.is_meta
        assert (first.shape, first.dtype) == (second.shape, second.dtype)


@every_case
def test_gradients_are_right(case):
    inputs = tuple(x.clone().requires_grad_() for x in case.inputs)
    assert torch.autograd.gradcheck(case.run, inputs)


@every_case
def test_forward_mode_is_refused(case):
    with pytest.raises((NotImplementedError, RuntimeError), match="forward"):
        torch.func.jvp(case.run, case.inputs, case.inputs)


@every_case
def test_functional_gradients_are_those_of_backward(case):
    outputs, expected = outputs_and_gradients(case.run, case.inputs)
    weights = [draw(*x.shape, seed=5) for x in outputs]

    def total(*inputs):
        found = [x for x in tree_leaves(case.run(*inputs)) if x.is_floating_point()]
        return sum((x * weight).sum() for x, weight in zip(found, weights, strict=True))

    found = torch.func.grad(total, argnums=tuple(range(len(case.inputs))))(*case.inputs)
    for first, second in zip(found, expected, strict=True):
        torch.testing.assert_close(first, second)


@pytest.mark.slow
@every_case
def test_a_compiled_graph_gives_the_same(case):
    torch._dynamo.reset()
    compiled = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    eager, graph = (outputs_and_gradients(run, case.inputs) for run in (case.run, compiled))
    for first, second in zip(tree_leaves(eager), tree_leaves(graph), strict=True):
        torch.testing.assert_close(first, second)


def test_this_file_would_notice_a_wrong_function():
    class Wrong(Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.mul_(2)

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            return grad

    case = Case({"Wrong"}, Wrong.apply, (draw(3),))
    with pytest.raises(AssertionError):
        test_inputs_are_left_as_they_are_and_outputs_have_memory_of_their_own(case)
    with pytest.raises((RuntimeError, AssertionError)):
        test_gradients_are_right(case)
