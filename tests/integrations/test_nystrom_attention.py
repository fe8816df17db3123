"""The names of the nystrom-attention package: its weights load, `legacy=True` meets its results, install() is seen."""

import copy
import importlib
import inspect
import sys

import nystrom_attention as package
import pytest
import torch
from imports import imported_by
from nystrom_attention import NystromAttention as PeerAttention
from nystrom_attention import Nystromformer as PeerModel
from nystrom_attention import nystrom_attention as package_file
from public_files import load, modules, public_file, stand_in
from published_transmil import PublishedTransMIL

from nystromformer.integrations import nystrom_attention as ours
from nystromformer.integrations.nystrom_attention import NystromAttention, Nystromformer, install, uninstall

SIZES = {"dim": 32, "dim_head": 8, "heads": 4, "num_landmarks": 8}
ATTRIBUTES = ("num_landmarks", "pinv_iterations", "scale", "heads", "residual", "eps")


def pair(mine_class=NystromAttention, peers_class=PeerAttention, legacy=True, dtype=torch.float64, **changes):
    """The package's module and ours with its weights."""
    torch.manual_seed(0)
    peer = peers_class(**SIZES | changes).to(dtype).eval()
    for p in peer.parameters():
        p.data.mul_(3)  # so that attention is peaked
    mine = mine_class(**SIZES | changes, legacy=legacy).to(dtype).eval()
    mine.load_state_dict(peer.state_dict())
    return mine, peer


def inputs(batch, length, dtype=torch.float64):
    return torch.randn(batch, length, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


def mask_of(kind, batch, length):
    """With holes, with padding at the end, or with an example without any token."""
    if kind is None:
        return None
    mask = torch.rand(batch, length, generator=torch.Generator().manual_seed(2)) < 0.6
    if kind == "padding":
        mask = torch.arange(length) < torch.tensor([[length], [length // 2 + 1], [1]])[:batch]
    if kind == "empty":
        mask[-1] = False
    return mask


def output_and_gradients(module, x, mask, seed=3):
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)  # of the dropout
    out = module(x, mask=mask)
    return out, torch.autograd.grad(out.square().sum(), [x, *module.parameters()])


@pytest.mark.parametrize("mine_class, peers_class", [(NystromAttention, PeerAttention), (Nystromformer, PeerModel)])
def test_arguments_and_their_defaults_are_the_packages(mine_class, peers_class):
    mine, theirs = (inspect.signature(module.__init__).parameters for module in (mine_class, peers_class))
    assert [name for name in mine if name != "legacy"] == list(theirs)
    assert all(mine[name].default == theirs[name].default for name in theirs)


def test_every_name_and_attribute_is_there():
    defined = {name for name, each in vars(package_file).items() if getattr(each, "__module__", "") == ours.SUBMODULE}
    assert defined == {
        "exists", "moore_penrose_iter_pinv", "NystromAttention", "PreNorm", "FeedForward", "Nystromformer"
    }  # fmt: skip
    assert defined | {"Nystromer"} <= vars(ours).keys()
    mine, peer = pair(pinv_iterations=5)
    assert {name: getattr(mine, name) for name in ATTRIBUTES} == {name: getattr(peer, name) for name in ATTRIBUTES}


@pytest.mark.parametrize("kind", [None, "holes", "padding", "empty"])
@pytest.mark.parametrize("length", [1, 5, 8, 9, 61, 64, 200])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_legacy_gives_the_packages_output_and_gradients(length, kind, training):
    mine, peer = pair(dropout=0.2)
    mine.train(training), peer.train(training)
    x, mask = inputs(3, length), mask_of(kind, 3, length)
    (out, gradients), (wanted, wanted_gradients) = (output_and_gradients(module, x, mask) for module in (mine, peer))
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-10)
    for found, expected in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", [None, "holes"])
@pytest.mark.parametrize("landmarks", [1, 7, 64])
def test_legacy_in_float32_gives_the_packages_output(landmarks, kind):
    mine, peer = pair(dtype=torch.float32, num_landmarks=landmarks)
    x, mask = inputs(3, 150, torch.float32), mask_of(kind, 3, 150)
    out, gradients = output_and_gradients(mine, x, mask)
    torch.testing.assert_close(out, peer(x, mask=mask), rtol=0, atol=1e-5)
    # PyTorch's float32 gradient of such a convolution can be wrong on CPUs: the package's is taken in float64.
    _, wanted = output_and_gradients(copy.deepcopy(peer).double(), x.double(), mask)
    for found, expected in zip(gradients, wanted, strict=True):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("changes", [{"residual": False}, {"residual_conv_kernel": 5}, {"pinv_iterations": 4}])
def test_legacy_follows_every_option(changes):
    mine, peer = pair(**changes)
    torch.testing.assert_close(mine(inputs(3, 61)), peer(inputs(3, 61)), rtol=0, atol=1e-10)


def test_attributes_that_are_set_later_count():
    mine, peer = pair()
    x, mask = inputs(2, 61), mask_of("holes", 2, 61)
    for module in (mine, peer):
        module.num_landmarks, module.pinv_iterations, module.scale, module.eps = 5, 3, 0.2, 1e-2
    torch.testing.assert_close(mine(x, mask), peer(x, mask), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [None, "holes", "empty"])
@pytest.mark.parametrize("length", [5, 61, 64])
def test_legacy_maps_are_the_packages(length, kind):
    mine, peer = pair()
    x, mask = inputs(3, length), mask_of(kind, 3, length)
    matrix = peer(x, mask, return_attn=True)[1]
    torch.testing.assert_close(mine(x, mask, return_attn=True)[1], matrix, rtol=0, atol=1e-10)
    factors, theirs = (module(x, mask, return_attn_matrices=True)[1] for module in (mine, peer))
    for factor, expected in zip(factors, theirs, strict=True):
        torch.testing.assert_close(factor, expected, rtol=0, atol=1e-9)
    padding = matrix.shape[-1] - length
    rows = mine(x, mask, return_attn=[0, -1])[1]
    torch.testing.assert_close(rows, matrix[:, :, [padding, -1], padding:], rtol=0, atol=1e-10)


def test_the_pseudoinverse_is_the_packages():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64).mul(4).requires_grad_()
    A, functions = x.softmax(-1), (ours.moore_penrose_iter_pinv, package_file.moore_penrose_iter_pinv)
    found, expected = (function(A, iters=5) for function in functions)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    gradients = (torch.autograd.grad(z.square().sum(), x, retain_graph=True)[0] for z in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("length, kind", [(64, None), (50, None), (50, "padding")])
def test_the_whole_model_with_its_weights_gives_its_output(length, kind):
    mine, peer = pair(Nystromformer, PeerModel, depth=2, attn_values_residual_conv_kernel=5)
    assert mine.state_dict().keys() == peer.state_dict().keys()
    mask = mask_of(kind, 3, length)
    torch.testing.assert_close(mine(inputs(3, length), mask), peer(inputs(3, length), mask), rtol=0, atol=1e-9)


def test_without_legacy_one_matrix_of_divisible_length_is_the_packages():
    mine, peer = pair(legacy=False, heads=1)
    torch.testing.assert_close(mine(inputs(1, 64)), peer(inputs(1, 64)))


@pytest.mark.parametrize("length", [3, 8, 50])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_without_legacy_the_factors_multiply_to_the_map(length, masked):
    mine, _ = pair(legacy=False)
    x = inputs(2, length)
    mask = torch.arange(length) < torch.tensor([[length], [max(length // 8, 2)]]) if masked else None
    F, Z, B = mine(x, mask, return_attn_matrices=True)[1]
    matrix = mine(x, mask, return_attn=True)[1]
    torch.testing.assert_close(F @ Z @ B, matrix)
    torch.testing.assert_close(mine(x, mask, return_attn=[1])[1], matrix[:, :, [1]])
    if masked:
        assert matrix[1, :, :, mask[1].sum() :].abs().max() == 0


def test_without_legacy_its_faults_are_gone():
    mine, peer = pair(legacy=False)
    x = inputs(3, 61)  # not divisible by 8
    alone = lambda module: torch.cat([module(example[None]) for example in x])
    assert (peer(x) - alone(peer)).abs().max() > 1e-4
    torch.testing.assert_close(mine(x), alone(mine), rtol=0, atol=1e-9)

    mask = torch.arange(61) < torch.tensor([[61], [40], [7]])
    together = mine(x, mask)
    for example, real in enumerate(mask.sum(1)):
        torch.testing.assert_close(
            together[example, :real], mine(x[example : example + 1, :real])[0], rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("legacy", [False, True])
def test_rows_of_long_input_need_no_matrix(legacy):
    torch.manual_seed(0)
    attention = NystromAttention(**SIZES, legacy=legacy)
    x = torch.randn(1, 20_000, 32)
    with torch.no_grad():
        assert attention(x, return_attn=[0])[1].shape == (1, 4, 1, 20_000)
        with pytest.raises(ValueError, match=r"return_attn=True with 20000 tokens.*return_attn=\[0\]"):
            attention(x, return_attn=True)


def test_gradients_reach_every_weight():
    model = Nystromformer(dim=32, depth=1, dim_head=8, heads=4, num_landmarks=8)
    model(torch.randn(2, 50, 32)).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"heads": 0}, "heads=0: must be at least 1"),
        ({"num_landmarks": 0}, "num_landmarks=0: must be at least 1"),
        ({"residual_conv_kernel": 4}, "residual_conv_kernel=4: must be odd"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        NystromAttention(**SIZES | changes)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"x has shape \(2, 9, 31\): must be \(batch, length, 32\)"):
        NystromAttention(**SIZES)(torch.randn(2, 9, 31))


@pytest.fixture
def package_not_imported(monkeypatch):
    for name in (ours.PACKAGE, ours.SUBMODULE):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("package_not_imported")
@pytest.mark.parametrize("legacy", [False, True])
def test_installed_names_are_seen_on_both_paths_until_uninstalled(legacy):
    install(legacy=legacy)
    theirs = importlib.import_module("nystrom_attention")
    inner = importlib.import_module("nystrom_attention.nystrom_attention")
    assert importlib.util.find_spec("nystrom_attention").name == "nystrom_attention"
    assert issubclass(theirs.NystromAttention, NystromAttention)
    assert inner.NystromAttention is theirs.NystromAttention
    assert theirs.Nystromer is theirs.Nystromformer is inner.Nystromformer
    assert inner.moore_penrose_iter_pinv is ours.moore_penrose_iter_pinv
    assert theirs.NystromAttention(**SIZES).legacy is legacy
    assert theirs.Nystromformer(**SIZES, depth=1).layers[0][0].fn.legacy is legacy
    install(legacy=not legacy)  # again, with another choice
    assert importlib.import_module("nystrom_attention").NystromAttention(**SIZES).legacy is not legacy
    uninstall()
    uninstall()
    again = importlib.import_module("nystrom_attention").NystromAttention
    assert again.__module__ == ours.SUBMODULE
    assert not issubclass(again, NystromAttention)


@pytest.mark.usefixtures("package_not_imported")
def test_install_as_a_context_ends_with_it():
    with install():
        assert importlib.import_module("nystrom_attention").NystromAttention is NystromAttention
    assert ours.PACKAGE not in sys.modules


def test_install_after_the_package_was_imported_is_refused():
    assert sys.modules[ours.PACKAGE] is package
    with pytest.raises(RuntimeError, match=r"was imported before install\(\).*call install\(\) before"):
        install()
    uninstall()
    assert sys.modules[ours.PACKAGE] is package


@pytest.mark.slow
def test_it_needs_torch_only():
    install = "from nystromformer.integrations.nystrom_attention import install; install()"
    assert not imported_by(f"{install}; import nystrom_attention.nystrom_attention", "transformers", "einops")


@pytest.mark.parametrize("tiles", [1, 20, 150])
def test_published_transmil_predicts_as_before(tiles):
    torch.manual_seed(0)
    theirs = PublishedTransMIL(PeerAttention, features=24, dim=64).eval()
    mine = PublishedTransMIL(ours._LegacyAttention, features=24, dim=64).eval()
    mine.load_state_dict(theirs.state_dict())
    bag = torch.randn(1, tiles, 24)
    torch.testing.assert_close(mine(bag), theirs(bag), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("package_not_imported")
def test_slideflows_transmil_predicts_as_before():
    path = public_file("NYSTROMFORMER_SLIDEFLOW")
    folders = {name: stand_in(name) for name in ("slideflow", "slideflow.model")}
    folders["slideflow.model.torch_utils"] = stand_in("slideflow.model.torch_utils", get_device=lambda: "cpu")
    with modules(folders):
        client = load(path, "slideflow_transmil")
    torch.manual_seed(0)
    theirs = client.TransMIL(n_feats=32, n_out=3).eval()  # imports the package
    for name in (ours.PACKAGE, ours.SUBMODULE):
        del sys.modules[name]
    with install(legacy=True):
        mine = client.TransMIL(n_feats=32, n_out=3).eval()
    assert isinstance(mine.layer1.attn, NystromAttention)
    assert not isinstance(theirs.layer1.attn, NystromAttention)
    mine.load_state_dict(theirs.state_dict())
    bag = inputs(1, 300, torch.float32)
    torch.testing.assert_close(mine(bag), theirs(bag), rtol=0, atol=1e-5)
    torch.testing.assert_close(mine.calculate_attention(bag), theirs.calculate_attention(bag), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("package_not_imported")
def test_vit_pytorchs_efficient_transformer_predicts_as_before():
    client = load(public_file("NYSTROMFORMER_VIT_PYTORCH"), "vit_pytorch_efficient")
    sizes = {"dim": 32, "depth": 2, "heads": 4, "dim_head": 8, "num_landmarks": 16}

    def vit(transformer_class):
        torch.manual_seed(0)
        transformer = transformer_class(**sizes)
        return client.ViT(dim=32, image_size=32, patch_size=4, num_classes=5, transformer=transformer).eval()

    theirs = vit(PeerModel)
    with install(legacy=True):
        from nystrom_attention import Nystromformer as Installed

        mine = vit(Installed)
    mine.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(mine(images), theirs(images), rtol=0, atol=1e-5)
