"""xformers' NystromAttention: its arguments, and its results by its description and by its last published file."""

import inspect
import math

import pytest
import torch
from largest_tensor import Largest
from public_files import load, modules, public_file, stand_in
from torch import nn

from nystromformer.integrations.xformers import AvgPool, NystromAttention

HEADS = 2
ARGUMENTS = {
    "dropout": inspect.Parameter.empty,
    "num_heads": inspect.Parameter.empty,
    "num_landmarks": 64,
    "landmark_pooling": None,
    "causal": False,
    "use_razavi_pinverse": True,
    "pinverse_original_init": False,
    "inv_iterations": 6,
    "v_skip_connection": None,
    "conv_kernel_size": None,
}


class Described(nn.Module):
    """The attention by its description, with every matrix made."""

    def __init__(self, dropout, num_heads, num_landmarks=64, landmark_pooling=None, use_razavi_pinverse=True,
                 pinverse_original_init=False, inv_iterations=6, conv_kernel_size=None):  # fmt: skip
        super().__init__()
        self.heads, self.m, self.iterations, self.razavi = num_heads, num_landmarks, inv_iterations, use_razavi_pinverse
        self.over_batch, self.pool = pinverse_original_init, landmark_pooling or self.means
        self.drop, self.skip_connection = nn.Dropout(dropout), None
        if conv_kernel_size:
            sizes = {"kernel_size": (conv_kernel_size, 1), "padding": (conv_kernel_size // 2, 0)}
            self.skip_connection = nn.Conv2d(num_heads, num_heads, **sizes, groups=num_heads, bias=False)

    def means(self, x):
        size, longer = divmod(x.shape[1], self.m)
        sizes = [size] * (self.m - longer) + [size + 1] * longer
        return torch.stack([part.mean(dim=1) for part in x.split(sizes, dim=1)], dim=1)

    def inverse(self, A):
        if not self.razavi:
            return torch.linalg.pinv(A)
        columns, eye = A.sum(dim=-2), torch.eye(self.m, dtype=A.dtype)
        Z = A.mT / (columns.max() if self.over_batch else columns.amax(dim=-1)[:, None, None])
        for _ in range(self.iterations):
            Z = Z @ (13 * eye - A @ Z @ (15 * eye - A @ Z @ (7 * eye - A @ Z))) / 4
        return Z

    def forward(self, q, k, v, key_padding_mask=None):
        bias = 0.0
        if key_padding_mask is not None:
            bias = key_padding_mask
            if bias.dtype == torch.bool:
                bias = torch.zeros(bias.shape, dtype=q.dtype).masked_fill(~bias, -math.inf)
            if bias.dim() == 2:
                bias = bias.repeat_interleave(len(k) // len(bias), dim=0)[:, None]
            real = (~bias.isinf()).mT.to(q.dtype)
            q, k = q * real, k * real
        softmax = lambda a, b, added=0.0: torch.softmax(a @ b.mT / math.sqrt(a.shape[-1]) + added, dim=-1)
        if self.m >= k.shape[-2]:
            out = softmax(q, k, bias) @ v
        else:
            queries, keys = self.pool(q), self.pool(k)
            out = softmax(q, keys) @ self.inverse(softmax(queries, keys)) @ (softmax(queries, k, bias) @ v)
        if self.skip_connection is not None:
            out = out + self.skip_connection(v.reshape(-1, self.heads, *v.shape[-2:])).reshape(out.shape)
        return self.drop(out)


@pytest.fixture(params=["description", "published file"])
def oracle(request):
    """A class to compare with: the description above, or the last file that xformers published."""
    return Described if request.param == "description" else published_class()


def published_class():
    path = public_file("NYSTROMFORMER_XFORMERS")
    base = {"Attention": nn.Module, "AttentionConfig": object, "register_attention": lambda *_: lambda each: each}
    inside = {
        "xformers": stand_in("xformers", _has_cpp_library=False),
        "xformers.components": stand_in("xformers.components"),
        "xformers.components.attention": stand_in("xformers.components.attention", **base),
        "xformers.components.attention.attention_mask": stand_in("attention_mask", AttentionMask=type("Mask", (), {})),
    }
    with modules(inside):
        for name in ("core", "utils"):
            name, file = f"xformers.components.attention.{name}", path.with_name(f"{name}.py")
            inside[name] = load(file, name)
        # The compiled library would define it; the file asks for it with and without.
        inside["xformers.components.attention.core"].SparseCS = type("SparseCS", (), {})
        with modules(inside):
            return load(path, "xformers.components.attention.nystrom").NystromAttention


def pair(oracle, **options):
    torch.manual_seed(0)
    theirs = oracle(dropout=0.0, num_heads=HEADS, **options).double()
    mine = NystromAttention(dropout=0.0, num_heads=HEADS, **options).double()
    mine.load_state_dict(theirs.state_dict())
    return mine, theirs


def tensors(length, keys=None, batch=3, width=4):
    generator = torch.Generator().manual_seed(1)
    sizes = (length, keys or length, keys or length)
    return [torch.randn(batch * HEADS, n, width, dtype=torch.float64, generator=generator) * 2 for n in sizes]


def assert_same(mine, theirs, *inputs, **masks):
    """Outputs, and gradients of the inputs and the weights."""
    results = []
    for module in (mine, theirs):
        given = [x.clone().requires_grad_() for x in inputs]
        out = module(*given, **masks)
        results.append((out, *torch.autograd.grad(out.square().sum(), [*given, *module.parameters()])))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def padding(length, batch=3):
    return torch.arange(length) < torch.tensor([length, length - 3, 4])[:batch, None]


def test_arguments_and_their_defaults_are_these():
    parameters = inspect.signature(NystromAttention).parameters
    assert {name: each.default for name, each in parameters.items()} == ARGUMENTS


def test_arguments_and_their_defaults_are_the_published():
    parameters = inspect.signature(published_class()).parameters.values()
    named = [each for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert {each.name: each.default for each in named} == ARGUMENTS


@pytest.mark.parametrize("length", [5, 8, 9, 15, 16, 50])
def test_results_are_those_of_xformers(oracle, length):
    assert_same(*pair(oracle, num_landmarks=8), *tensors(length))


@pytest.mark.parametrize(
    "options",
    [
        {"pinverse_original_init": True},
        {"inv_iterations": 3},
        {"use_razavi_pinverse": False},
        {"conv_kernel_size": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_every_option_does_what_it_did(oracle, options, masked):
    masks = {"key_padding_mask": torch.zeros(3, 50).double().masked_fill(~padding(50), -math.inf)} if masked else {}
    assert_same(*pair(oracle, num_landmarks=8, **options), *tensors(50), **masks)


@pytest.mark.parametrize("length", [6, 50])
@pytest.mark.parametrize("kind", ["boolean", "additive", "for each head", "with a bias"])
def test_key_padding_masks_do_what_they_did(oracle, length, kind):
    mask = padding(length)
    additive = torch.zeros(3, length, dtype=torch.float64).masked_fill(~mask, -math.inf)
    given = {
        "boolean": mask,
        "additive": additive,
        "for each head": additive.repeat_interleave(HEADS, dim=0)[:, None],
        "with a bias": additive + torch.linspace(-1, 1, length, dtype=torch.float64),
    }[kind]
    assert_same(*pair(oracle, num_landmarks=8), *tensors(length), key_padding_mask=given)


@pytest.mark.parametrize("queries, keys", [(30, 50), (50, 30), (8, 50), (50, 7)])
def test_cross_attention_is_that_of_xformers(oracle, queries, keys):
    assert_same(*pair(oracle, num_landmarks=8), *tensors(queries, keys))


def test_fewer_queries_than_landmarks_are_exact_where_xformers_failed():
    q, k, v = tensors(5, 50)
    found = NystromAttention(0.0, HEADS, num_landmarks=8)(q, k, v)
    torch.testing.assert_close(found, nn.functional.scaled_dot_product_attention(q, k, v))


def test_heads_in_the_place_of_the_length_attend_among_themselves(oracle):
    """(b, n, h, d), as some projects call it: exact over the heads."""
    x = [torch.randn(2, 30, 6, 4, dtype=torch.float64) for _ in range(3)]
    assert_same(*pair(oracle, num_landmarks=8), *x)


def test_four_dimensions_are_batch_and_heads():
    mine, _ = pair(Described, num_landmarks=8, conv_kernel_size=3)
    q, k, v = tensors(50)
    split = [x.unflatten(0, (3, HEADS)) for x in (q, k, v)]
    expected = mine(q, k, v, key_padding_mask=padding(50))
    torch.testing.assert_close(mine(*split, key_padding_mask=padding(50)).flatten(0, 1), expected)


def test_modules_of_ones_own_pool_and_skip(oracle):
    class EveryFourth(nn.Module):
        def forward(self, x):
            return x[:, ::4]

    mine, theirs = pair(oracle, num_landmarks=8, landmark_pooling=EveryFourth())
    assert_same(mine, theirs, *tensors(32))
    skipping = NystromAttention(0.0, HEADS, num_landmarks=8, v_skip_connection=nn.Identity())
    q, k, v = tensors(32)
    torch.testing.assert_close(skipping(q, k, v), NystromAttention(0.0, HEADS, num_landmarks=8)(q, k, v) + v)


def test_dropout_draws_what_xformers_draws(oracle):
    x = tensors(50)
    outs = []
    for each in (oracle, NystromAttention):
        torch.manual_seed(5)
        outs.append(each(dropout=0.3, num_heads=HEADS, num_landmarks=8)(*x))
    torch.testing.assert_close(*outs)


def test_float32_is_met_to_its_precision(oracle):
    mine, theirs = (each.float() for each in pair(oracle, num_landmarks=16))
    x = [each.float() for each in tensors(300)]
    torch.testing.assert_close(mine(*x), theirs(*x), rtol=0, atol=1e-5)


def test_an_example_without_a_key_gives_zeros_with_finite_gradients():
    q, k, v = (x.requires_grad_() for x in tensors(50))
    mask = padding(50)
    mask[1] = False
    out = NystromAttention(0.0, HEADS, num_landmarks=8)(q, k, v, key_padding_mask=mask)
    assert (out.unflatten(0, (3, HEADS))[1] == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


def test_no_matrix_of_all_tokens_and_landmarks_is_made():
    q, k, v = (torch.randn(HEADS, 4000, 8) for _ in range(3))
    attention = NystromAttention(0.0, HEADS, num_landmarks=64)
    with Largest() as largest:
        attention(q, k, v)
    assert largest.elements < HEADS * 4000 * 64


def test_pooling_means_segments():
    x = torch.arange(7.0).view(1, 7, 1)
    assert AvgPool(3)(x).flatten().tolist() == [0.5, 2.5, 5.0]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: NystromAttention(0.0, 2, causal=True), "causal=True: must be False, because landmarks average over"),
        (lambda: NystromAttention(0.0, 2, conv_kernel_size=4), "conv_kernel_size=4: must be odd"),
        (lambda: NystromAttention(0.0, 0), "num_heads=0: must be at least 1"),
        (lambda: AvgPool(9)(torch.ones(1, 4, 2)), "x has 4 tokens: must have at least as many as landmarks, 9"),
        (lambda: NystromAttention(0.0, 2)(*[torch.ones(2, 5)] * 3), r"q has shape \(2, 5\): must be \(b·h, n, d\)"),
        (lambda: NystromAttention(0.0, 2)(*tensors(5), att_mask=torch.ones(5, 5)), "att_mask was given"),
        (lambda: NystromAttention(0.0, 2)(*tensors(5), torch.ones(4, 5).bool()), r"must be \(b, 5\) with 6 = b·h"),
        (lambda: NystromAttention(0.0, 2)(*tensors(5, 6), torch.ones(3, 6).bool()), "there must be as many"),
        (lambda: NystromAttention(0.0, 4, conv_kernel_size=3)(*tensors(5)), "divisible by num_heads=4"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
