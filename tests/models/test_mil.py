"""TransMIL: published weights predict as published; otherwise masks, coordinates and maps keep the contract."""

import copy

import pytest
import torch
from largest_tensor import Largest
from nystrom_attention import NystromAttention as PackageAttention
from published_transmil import PublishedTransMIL

from nystromformer.models.mil import TransMIL, normalized_map
from nystromformer.models.mil_grid import checked_cells, square_cells

SIZES = {"dim": 32, "heads": 4, "num_landmarks": 8}


def published(**changes):
    torch.manual_seed(0)
    return PublishedTransMIL(PackageAttention, **{"features": 24, "dim": 64, "n_classes": 3} | changes).eval()


def model(**changes):
    torch.manual_seed(0)
    return TransMIL(24, 3, **SIZES | changes).double().eval()


def bags(batch=3, tiles=60, features=24, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, tiles, features, generator=generator, dtype=torch.float64).to(dtype)


def cells_of(batch=3, tiles=60):
    """Different places of a grid of 12 × 12."""
    generator = torch.Generator().manual_seed(2)
    places = torch.stack([torch.randperm(144, generator=generator)[:tiles] for _ in range(batch)])
    return torch.stack([places // 12, places % 12], dim=2)


MASK = torch.arange(60) < torch.tensor([[60], [31], [5]])


@pytest.mark.parametrize("tiles", [1, 2, 30, 36, 200])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_published_weights_give_the_published_logits_and_gradients(tiles, training):
    theirs = published().double().train(training)
    mine = TransMIL.from_published(theirs.state_dict()).train(training)
    data = bags(2, tiles)
    results = []
    for each in (mine, theirs):
        x = data.clone().requires_grad_()
        torch.manual_seed(3)  # of the dropout
        logits = each(x)
        weights = dict(sorted(each.named_parameters()))
        results.append((logits, *torch.autograd.grad(logits.square().sum(), [x, *weights.values()])))
    assert len(results[0]) == 2 + len(theirs.state_dict())
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def test_published_sizes_in_float32_are_met_to_1e_5():
    """The published 1,024 features, width 512, 8 heads and 256 landmarks."""
    theirs = published(features=1024, dim=512, n_classes=2)
    mine = TransMIL.from_published(theirs.state_dict())
    bag = bags(1, 500, 1024, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(mine(bag), theirs(bag), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tiles", [30, 150])
def test_the_rows_of_published_weights_are_the_packages(tiles):
    theirs = published().double()
    mine = TransMIL.from_published(theirs.state_dict())
    bag = bags(1, tiles)
    with torch.no_grad():
        matrix = theirs.layer2.attn(theirs.layer2.norm(theirs.second_tokens(bag)), return_attn=True)[1]
        rows = mine.attention_rows(bag)
    side = int(torch.tensor(tiles).sqrt().ceil())
    row = matrix[:, :, -(side**2 + 1), -(side**2) :]  # the class token's, after the zeros in front
    expected = row[..., :tiles].clone()
    expected[..., : side**2 - tiles] += row[..., tiles:]  # the tiles that were repeated to fill the square
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-9)


def test_with_a_mask_published_weights_read_each_bag_alone():
    theirs = published().double()
    mine = TransMIL.from_published(theirs.state_dict())
    data, mask = bags().masked_fill(~MASK[..., None], torch.nan), MASK
    with torch.no_grad():
        alone = torch.cat([theirs(bag[real][None]) for bag, real in zip(data, mask, strict=True)])
        torch.testing.assert_close(mine(data, mask), alone, rtol=0, atol=1e-9)
        rows = mine.attention_rows(data, mask)
        torch.testing.assert_close(rows[1:2, :, :31], mine.attention_rows(data[1:2, :31]), rtol=0, atol=1e-9)
    assert (rows[1, :, 31:] == 0).all()


def test_state_dicts_go_both_ways_and_lose_their_prefix():
    theirs = published()
    weights = theirs.state_dict()
    mine = TransMIL.from_published({f"model.{name}": each for name, each in weights.items()} | {"loss.weight": None})
    assert mine.state_dict().keys() == weights.keys()
    again = published(n_classes=3)
    again.load_state_dict(mine.state_dict())
    assert (mine.features, mine.classes, mine.layer1.attn.heads) == (24, 3, 8)


@pytest.mark.parametrize("placed", [False, True], ids=["square", "coordinates"])
@pytest.mark.parametrize("kernel", [None, 33])
def test_a_bag_gives_the_same_alone_and_padded_in_a_batch(placed, kernel):
    each = model(conv_kernel_size=kernel)
    cells = cells_of() if placed else None
    data = bags().masked_fill(~MASK[..., None], torch.nan)
    with torch.no_grad():
        together, rows = each(data, MASK, cells), each.attention_rows(data, MASK, cells)
        for index, count in enumerate(MASK.sum(dim=1)):
            alone = (data[index : index + 1, :count], None, None if cells is None else cells[index : index + 1, :count])
            torch.testing.assert_close(each(*alone)[0], together[index], rtol=0, atol=1e-9)
            torch.testing.assert_close(each.attention_rows(*alone)[0], rows[index, :, :count], rtol=0, atol=1e-9)
            assert (rows[index, :, count:] == 0).all()


def test_gradients_are_finite_with_nan_in_padding_and_reach_every_weight():
    each = model().train()
    data = bags().masked_fill(~MASK[..., None], torch.nan)
    each(data, MASK, cells_of()).square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in each.parameters())


def test_where_a_grid_begins_does_not_matter_but_where_a_tile_lies_does():
    each, data, cells = model(), bags(), cells_of()
    with torch.no_grad():
        torch.testing.assert_close(each(data, None, cells), each(data, None, cells - 1000))
        moved = cells.clone()
        moved[:, 0] += 40
        assert (each(data, None, cells) - each(data, None, moved)).abs().max() > 1e-6


def test_without_coordinates_tiles_fill_a_square():
    each, data = model(), bags(2, 36)
    cells = torch.stack([torch.arange(36) // 6, torch.arange(36) % 6], dim=1).expand(2, -1, -1)
    with torch.no_grad():
        torch.testing.assert_close(each(data), each(data, None, cells))
    assert square_cells(torch.ones(1, 5, dtype=torch.bool))[0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]


def test_the_grid_convolution_is_the_sum_of_its_three_on_the_grid():
    layer = model().pos_layer
    tiles, cells = torch.randn(1, 60, 32, dtype=torch.float64), cells_of(1)
    grid = torch.zeros(1, 32, 12, 12, dtype=torch.float64)
    grid[0, :, cells[0, :, 0], cells[0, :, 1]] = tiles[0].T
    convolved = layer.proj(grid) + layer.proj1(grid) + layer.proj2(grid)
    expected = tiles[0] + convolved[0, :, cells[0, :, 0], cells[0, :, 1]].T
    found = layer(tiles, cells, torch.ones(1, 60, dtype=torch.bool))
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-9)


def test_the_rows_of_a_small_bag_are_softmax_rows_of_the_class_token():
    each = model(num_landmarks=64, conv_kernel_size=None)
    seen = {}
    each.layer2.attn.to_qkv.register_forward_hook(lambda _, __, out: seen.update(qkv=out))
    with torch.no_grad():
        rows = each.attention_rows(bags(1, 40))
    query, key, _ = (x.unflatten(2, (4, 8)).transpose(1, 2) for x in seen["qkv"].chunk(3, dim=2))
    expected = torch.softmax(query[:, :, :1] @ key.mT / 8**0.5, dim=-1)[:, :, 0, 1:]
    torch.testing.assert_close(rows, expected, rtol=0, atol=1e-9)


def test_rows_are_the_weights_that_the_logits_were_made_with():
    """Without the convolution, the class token's output is its row times the values."""
    each = model(conv_kernel_size=None)
    seen = {}
    each.layer2.attn.to_qkv.register_forward_hook(lambda _, __, out: seen.update(qkv=out))
    each.layer2.attn.to_out.register_forward_pre_hook(lambda _, given: seen.update(attended=given[0]))
    with torch.no_grad():
        rows = each.attention_rows(bags(1, 60))
    value = seen["qkv"].chunk(3, dim=2)[2].unflatten(2, (4, 8)).transpose(1, 2)  # (b h n d)
    attended = seen["attended"][:, 0].unflatten(1, (4, 8))  # (b h d)
    rest = attended - (rows[:, :, None] @ value[:, :, 1:])[:, :, 0]  # what came from the class token itself
    own = (rest * value[:, :, 0]).sum(-1) / value[:, :, 0].square().sum(-1)
    torch.testing.assert_close(rest, own[..., None] * value[:, :, 0], rtol=0, atol=1e-9)


def test_maps_run_from_0_to_1_in_the_order_of_the_weights():
    each = model()
    with torch.no_grad():
        rows, found = each.attention_rows(bags(), MASK), each.attention_map(bags(), MASK)
    for weights, shown, real in zip(rows.mean(dim=1), found, MASK, strict=True):
        assert (shown[real].min(), shown[real].max()) == (0, 1)
        assert torch.equal(shown[real].argsort(), weights[real].argsort())
        assert (shown[~real] == 0).all()
    assert torch.equal(normalized_map(torch.full((1, 2, 4), 0.25)), torch.zeros(1, 4))


@pytest.mark.parametrize("legacy", [False, True])
def test_a_large_bag_makes_no_matrix_of_its_pairs(legacy):
    each, bag = model(legacy=legacy).float(), bags(1, 20_000, dtype=torch.float32)
    with torch.no_grad(), Largest() as largest:
        assert each.attention_rows(bag).shape == (1, 4, 20_000)
    assert largest.elements < 20_000 * 200


def test_it_copies_and_loads():
    each = model()
    again = model(conv_kernel_size=33)
    again.load_state_dict(copy.deepcopy(each).state_dict())
    torch.testing.assert_close(each(bags()), again(bags()))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: TransMIL(24, 0), "classes=0: must be at least 1"),
        (lambda: TransMIL(24, 2, dim=30, heads=8), "dim=30 is not divisible by heads=8"),
        (lambda: model()(bags()[0]), r"features have shape \(60, 24\): must be \(bags, tiles, 24\).*bag\[None\]"),
        (lambda: model()(bags(), MASK & (torch.arange(3) < 2)[:, None]), "mask leaves bag 2 without a tile"),
        (lambda: model(legacy=True)(bags(), None, cells_of()), "coordinates were given with legacy=True"),
        (lambda: model()(bags(), None, cells_of()[:, :9]), r"coordinates have shape \(3, 9, 2\): must be \(3, 60, 2\)"),
        (lambda: model()(bags(), None, cells_of() * 256), r"coordinates span .* cells: at most 1,048,576; give row"),
        (lambda: TransMIL.from_published({}), "state_dict has 0 names that end in cls_token.*it has nothing"),
        (lambda: TransMIL.from_published({"cls_token": torch.ones(1, 1, 4)}), "state_dict has no _fc1.0.weight, _fc2"),
        (
            lambda: TransMIL.from_published(model(conv_kernel_size=None).state_dict()),
            "no layer1.attn.res_conv.weight.*conv_kernel_size=None, legacy=True",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_coordinates_in_fractions_are_refused():
    with pytest.raises(TypeError, match=r"coordinates have dtype torch.float32.*divide pixels by the size of a tile"):
        checked_cells(torch.ones(1, 2, 2), torch.ones(1, 2, dtype=torch.bool))


SIZES_OF_BAGS = [60, 31, 1, 5]
BORDERS = torch.tensor([0, *SIZES_OF_BAGS], dtype=torch.int32).cumsum(0)


def packed_bags():
    return bags(1, sum(SIZES_OF_BAGS))[0], cells_of(1, sum(SIZES_OF_BAGS))[0]


@pytest.mark.parametrize("placed", [False, True], ids=["square", "coordinates"])
@pytest.mark.parametrize("changes", [{}, {"conv_kernel_size": None}, {"legacy": True}], ids=str)
def test_packed_bags_give_what_each_gives_alone_with_gradients(changes, placed):
    if placed and "legacy" in changes:
        pytest.skip("the published model has no coordinates")
    each, (features, cells) = model(**changes), packed_bags()
    split = [x.split(SIZES_OF_BAGS) for x in (features, cells)]
    alone = [each(bag[None], None, place[None] if placed else None) for bag, place in zip(*split, strict=True)]
    packed = each(features, coordinates=cells if placed else None, cu_seqlens=BORDERS)
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-9)
    found, expected = (
        torch.autograd.grad(out.sin().sum(), list(each.parameters())) for out in (packed, torch.cat(alone))
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


@pytest.mark.parametrize("legacy", [False, True])
def test_maps_of_packed_bags_are_those_of_each(legacy):
    each, (features, _) = model(legacy=legacy), packed_bags()
    rows, maps = (f(features, cu_seqlens=BORDERS) for f in (each.attention_rows, each.attention_map))
    assert rows.shape == (4, sum(SIZES_OF_BAGS))
    for bag, row, shown in zip(*(x.split(SIZES_OF_BAGS, dim=-1) for x in (features.T, rows, maps)), strict=True):
        torch.testing.assert_close(row, each.attention_rows(bag.T[None])[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(shown, each.attention_map(bag.T[None])[0], rtol=0, atol=1e-7)


def test_wrong_packed_bags_say_what_is_allowed():
    each, (features, cells) = model(), packed_bags()
    with pytest.raises(ValueError, match=r"features have shape \(1, 97, 24\): with cu_seqlens they must"):
        each(features[None], cu_seqlens=BORDERS)
    with pytest.raises(ValueError, match="mask was given with cu_seqlens: packed bags have no padding"):
        each(features, torch.ones(1, 97, dtype=torch.bool), cu_seqlens=BORDERS)
    with pytest.raises(ValueError, match="sequence 1 is empty: every sequence must have a token"):
        each(features, cu_seqlens=torch.tensor([0, 5, 5, 97]))
    with pytest.raises(ValueError, match=r"coordinates have shape \(96, 2\): must be \(97, 2\)"):
        each(features, coordinates=cells[1:], cu_seqlens=BORDERS)
    with pytest.raises(ValueError, match="packed sequences were given with legacy=True: the package has none"):
        model(legacy=True).layer1.attn.attend_packed(torch.zeros(3, 32).double(), torch.tensor([0, 3]))
