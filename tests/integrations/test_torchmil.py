"""torchmil's layer: its results by the package that it was taken from and by its own file, and its own tests."""

import subprocess
import sys

import pytest
import torch
from nystrom_attention import NystromAttention as PackageLayer
from public_files import load, public_file
from torch import nn

from nystromformer.integrations.torchmil import NystromAttention, adapt

SIZES = {"in_dim": 12, "out_dim": 10, "att_dim": 16, "n_heads": 2, "n_landmarks": 8}


@pytest.fixture
def bags():
    torch.manual_seed(0)
    x = torch.randn(2, 37, 12, dtype=torch.float64)
    return x, torch.arange(37) < torch.tensor([[37], [20]])


def package_of(layer: NystromAttention) -> PackageLayer:
    """The package's layer with the same weights, before its output projection."""
    package = PackageLayer(12, dim_head=8, heads=2, num_landmarks=8, residual=False).double().eval()
    package.to_qkv.weight, package.to_out = layer.qkv_nn.weight, layer.out_proj
    return package


@pytest.mark.parametrize("masked", [False, True])
def test_legacy_computes_what_the_package_computes(bags, masked):
    x, mask = bags
    layer = NystromAttention(**SIZES, legacy=True).double()
    package, mask = package_of(layer), mask if masked else None
    expected, matrix = package(x, mask=mask, return_attn=True)
    out, weights = layer(x, mask, return_att=True)
    rows = layer(x, mask, return_att=[0, -1])[1]
    real = torch.ones(2, 37, dtype=torch.bool) if mask is None else mask
    torch.testing.assert_close(out[real], expected[real], atol=1e-9, rtol=0)
    torch.testing.assert_close(weights, matrix[:, :, -37:, -37:], atol=1e-9, rtol=0)
    torch.testing.assert_close(rows, weights[:, :, [0, -1]], atol=1e-12, rtol=0)


def test_a_bag_gives_the_same_alone_and_in_a_batch(bags):
    x, mask = bags
    layer = NystromAttention(**SIZES).double()
    together = layer(x, mask)
    torch.testing.assert_close(together[1:, :20], layer(x[1:, :20]), atol=1e-9, rtol=0)
    torch.testing.assert_close(layer(x, mask.to(torch.uint8)), together)


def test_short_bags_are_exact(bags):
    x = bags[0][:, :8]
    layer = NystromAttention(12, n_heads=3, learn_weights=False, att_dim=48, n_landmarks=8).double()
    heads = x.unflatten(2, (3, 4)).transpose(1, 2)
    expected = nn.functional.scaled_dot_product_attention(heads, heads, heads, scale=16**-0.5)
    torch.testing.assert_close(layer(x), expected.transpose(1, 2).flatten(2), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"att_dim": 15}, "att_dim=15 is not divisible by n_heads=2"),
        ({"in_dim": 13, "learn_weights": False}, "in_dim=13 is not divisible by n_heads=2"),
        ({"n_landmarks": 0}, "num_landmarks=0"),
    ],
)
def test_bad_sizes_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        NystromAttention(**SIZES | arguments)


def test_a_matrix_of_many_tokens_is_refused_and_its_rows_are_not():
    layer, x = NystromAttention(**SIZES), torch.randn(1, 5000, 12)
    with pytest.raises(ValueError, match=r"return_att=\[0\]"):
        layer(x, return_att=True)
    assert layer(x, return_att=[0])[1].shape == (1, 2, 1, 5000)


def test_a_model_without_such_a_layer_is_refused():
    with pytest.raises(ValueError, match=r"has no layer of torchmil's NystromAttention"):
        adapt(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("learn_weights", [True, False])
def test_the_layers_of_a_model_are_replaced_with_their_weights(bags, learn_weights):
    path = public_file("NYSTROMFORMER_TORCHMIL")
    theirs = load(path, "torchmil.nn.attention.nystrom_attention").NystromAttention
    model = nn.ModuleDict({"attention": theirs(12, 10, 16, 2, learn_weights, 8)}).double()
    (x, mask), weights = bags, model.state_dict()
    expected = model["attention"](x, mask), *model["attention"](x, return_att=True)
    assert adapt(model, legacy=True) == ["attention"]
    assert isinstance(model["attention"], NystromAttention)
    assert all(model.state_dict()[name] is not None for name in weights)
    found = model["attention"](x, mask), *model["attention"](x, return_att=True)
    torch.testing.assert_close(found[0][mask], expected[0][mask], atol=1e-9, rtol=0)
    for ours, its in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, its, atol=1e-9, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("legacy", [True, False])
def test_its_own_tests_pass_on_ours(tmp_path, legacy):
    """torchmil's test file of the layer, with our class under torchmil's name."""
    root = public_file("NYSTROMFORMER_TORCHMIL").parents[3]
    package = tmp_path / "torchmil" / "nn" / "attention"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "nystrom_attention.py").write_text(
        "from functools import partial\n"
        "from nystromformer.integrations.torchmil import NystromAttention as ours\n"
        f"NystromAttention = partial(ours, legacy={legacy})\n"
    )
    theirs = root / "tests" / "nn" / "attention" / "test_nystrom_attention.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(theirs)]
    ran = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path), "PATH": ""}, capture_output=True)
    assert ran.returncode == 0, ran.stdout.decode()[-2000:]
