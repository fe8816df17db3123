import oracles
import pytest
import torch
from drawn import qkv, random_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import avg_pool2d, scaled_dot_product_attention

from nystromformer import build_attention, nystrom_attention
from nystromformer.attention import kmeans_landmarks, sampled_softmax_approximation, segment_means
from nystromformer.attention.nystrom.landmarks import farthest_tokens, grid_segments, means_over, segments
from nystromformer.bench.measure import Kernels


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 45), st.integers(0, 1000))
def test_segment_means_average_the_valid_tokens_of_each_segment(n, m, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, n, generator=generator) < 0.7
    means = segment_means(tokens, m, mask)
    divided = segments(tokens, m, mask)
    for b in range(2):
        valid = tokens[b, :, mask[b]]
        if valid.shape[1] == 0:
            assert (means[b] == 0).all()
            continue
        expected = torch.nan_to_num(oracles.segment_matrix(valid.shape[1], m)) @ valid
        torch.testing.assert_close(means[b], expected)
        counted = torch.bincount(divided.index[b, mask[b]], minlength=m)
        assert torch.equal(counted, divided.counts[b])
        assert divided.counts[b].max() - divided.counts[b].min() <= 1


def test_segment_means_of_half_precision_are_float32():
    tokens = torch.randn(1, 1, 1000, 4).bfloat16()
    means = segment_means(tokens, 10)
    assert means.dtype == torch.float32
    torch.testing.assert_close(means, segment_means(tokens.float(), 10))


def lloyd(points, m, steps=3):
    """K-means of (n, d), one point at a time."""
    centers = list(oracles.segment_matrix(len(points), m) @ points)
    for _ in range(steps):
        groups = [[] for _ in centers]
        for x in points:
            distances = [torch.inf if c is None else (x - c).square().sum().item() for c in centers]
            groups[distances.index(min(distances))].append(x)
        centers = [torch.stack(group).mean(0) if group else None for group in groups]
    return torch.stack([torch.zeros(points.shape[1], dtype=points.dtype) if c is None else c for c in centers])


@pytest.mark.parametrize("n, m", [(50, 5), (31, 17), (200, 20)])
def test_kmeans_equals_lloyds_steps_on_valid_tokens(n, m):
    tokens = torch.randn(2, 2, n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    mask = torch.rand(2, n, generator=torch.Generator().manual_seed(m)) < 0.8
    landmarks = kmeans_landmarks(tokens, m, mask)
    for b in range(2):
        for h in range(2):
            torch.testing.assert_close(landmarks[b, h], lloyd(tokens[b, h, mask[b]], m))


def test_kmeans_lowers_the_distance_to_the_nearest_landmark():
    tokens = torch.randn(1, 1, 300, 2, generator=torch.Generator().manual_seed(0))
    spread = [
        torch.cdist(tokens, select(tokens, 10)).amin(-1).square().mean() for select in (segment_means, kmeans_landmarks)
    ]
    assert spread[1] < 0.5 * spread[0]


@pytest.mark.parametrize("select", [segment_means, kmeans_landmarks])
def test_with_at_most_m_tokens_landmarks_are_the_tokens(select):
    tokens = torch.randn(1, 2, 30, 4)
    tokens[:, :, 1] = tokens[:, :, 0]
    mask = torch.arange(30)[None] % 3 == 0
    landmarks = select(tokens, 16, mask)
    kept = landmarks[:, :, landmarks.abs().sum((0, 1, 3)) > 0]
    torch.testing.assert_close(kept, tokens[:, :, ::3])


@pytest.mark.parametrize("select", [segment_means, kmeans_landmarks])
def test_bad_arguments_are_refused(select):
    with pytest.raises(ValueError, match="num_landmarks=0: must be at least 1"):
        select(torch.randn(1, 1, 4, 2), 0)
    with pytest.raises(TypeError, match="must be torch.bool"):
        select(torch.randn(1, 1, 4, 2), 2, torch.ones(1, 4))


def test_sampled_rows_and_columns_are_reproduced():
    """The paper's eq. 3: F_S A_S⁺ B_S leaves sampled rows and columns as they are, and approximates the rest."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 3, n, 4, dtype=torch.float64, generator=generator) for n in (30, 24))
    approximation, softmax = sampled_softmax_approximation(query, key, num_samples=6)
    torch.testing.assert_close(softmax, torch.softmax(query @ key.mT / 2, dim=-1))
    rows, columns = [2, 7, 12, 17, 22, 27], [2, 6, 10, 14, 18, 22]
    torch.testing.assert_close(approximation[:, :, rows], softmax[:, :, rows])
    torch.testing.assert_close(approximation[..., columns], softmax[..., columns])
    assert not torch.allclose(approximation, softmax)


def test_all_samples_reproduce_the_matrix():
    x = torch.randn(1, 1, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(*sampled_softmax_approximation(x, x, num_samples=12))


def test_more_samples_than_tokens_are_refused():
    x = torch.randn(1, 1, 12, 6)
    with pytest.raises(ValueError, match="num_samples=13: must be at most 12"):
        sampled_softmax_approximation(x, x, 13)


@pytest.mark.parametrize("landmarks", [segment_means, kmeans_landmarks])
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((torch.ones(3, 4), 2), ValueError, r"tokens has shape \(3, 4\): must have 4 dimensions"),
        (([1.0], 2), TypeError, r"tokens is a list: must be a torch.Tensor"),
        ((torch.ones(1, 1, 3, 4).long(), 2), TypeError, r"tokens has dtype torch.int64"),
        ((torch.ones(1, 1, 3, 4), 0), ValueError, r"num_landmarks=0: must be at least 1"),
        ((torch.ones(1, 1, 3, 4), 2, torch.ones(1, 3)), TypeError, r"mask has dtype torch.float32"),
        ((torch.ones(1, 1, 3, 4), 2, torch.ones(1, 4).bool()), ValueError, r"mask has shape \(1, 4\): must be"),
    ],
    ids=str,
)
def test_bad_input_says_what_is_allowed(landmarks, arguments, error, message):
    with pytest.raises(error, match=message):
        landmarks(*arguments)


@pytest.mark.parametrize("layout", ["heads first", "projections"])
@pytest.mark.parametrize("n, m", [(12, 4), (12, 12), (12, 1), (13, 4)])
def test_without_a_mask_means_and_gradients_equal_those_with_a_mask_of_ones(n, m, layout):
    tokens = torch.randn(2, 3, n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n * m))
    if layout == "projections":
        tokens = tokens.transpose(1, 2).contiguous().transpose(1, 2)
    tokens.requires_grad_()
    results = []
    for mask in (None, torch.ones(2, n, dtype=torch.bool)):
        means = segment_means(tokens, m, mask)
        results.append((means, *torch.autograd.grad(means.square().sum(), tokens)))
    torch.testing.assert_close(*results)


def test_means_of_equal_segments_are_one_kernel_in_either_direction():
    tokens = torch.randn(2, 3, 24, 5).requires_grad_()
    divided = segments(tokens, 4)
    with Kernels() as kernels:
        means = means_over(tokens, divided)
    assert kernels.count == 1
    with Kernels() as kernels:
        torch.autograd.grad(means, tokens, means)
    assert kernels.count == 1


def test_means_are_those_of_pooling():
    tokens, _, _ = qkv(2, 3, 48, d=4)
    means = means_over(tokens, grid_segments(tokens, 12, None, (6, 8)))
    image = tokens.transpose(2, 3).reshape(6, 4, 6, 8)
    pooled = avg_pool2d(image, (2, 2)).flatten(2).transpose(1, 2).view(2, 3, 12, 4)
    torch.testing.assert_close(means, pooled)


def test_what_is_masked_changes_nothing_and_short_examples_are_exact():
    tensors, mask = qkv(2, 2, 60, d=4), random_mask(2, 60, share=0.6)
    mask[1] = torch.arange(60) < 7
    options = {"num_landmarks": 9, "landmarks": "grid", "grid_shape": (6, 10)}
    out = nystrom_attention(*tensors, mask, **options)
    other = [torch.where(mask[:, None, :, None], x, torch.nan) for x in tensors]
    torch.testing.assert_close(nystrom_attention(*other, mask, **options), out)
    exact = scaled_dot_product_attention(*(x[1:, :, :7] for x in tensors))
    torch.testing.assert_close(out[1:, :, :7], exact)
    assert (out[~mask[:, None].expand(2, 2, 60)] == 0).all()


def test_tiles_suit_images_better_than_stretches_of_rows():
    place = torch.arange(24.0)
    image = torch.stack(torch.meshgrid(place, place, indexing="ij"), dim=-1).view(1, 1, 576, 2) / 6
    value = image.double()
    query = key = value
    exact = scaled_dot_product_attention(query, key, value)
    means, tiles = (
        (nystrom_attention(query, key, value, num_landmarks=36, **options) - exact).norm()
        for options in ({}, {"landmarks": "grid", "grid_shape": (24, 24)})
    )
    assert tiles < means


@pytest.mark.parametrize(
    "options, message",
    [
        ({"landmarks": "grid"}, "grid_shape=None: must be two whole numbers"),
        ({"landmarks": "grid", "grid_shape": (4, 0)}, "must be two whole numbers"),
        ({"grid_shape": (4, 4)}, "it is for landmarks='grid'"),
        ({"landmarks": "grid", "grid_shape": (4, 5)}, r"\(4, 5\) has 20 places, and there are 30 tokens"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(options, message):
    attention = {"num_heads": 1, "head_dim": 2}
    with pytest.raises(ValueError, match=message):
        build_attention("nystrom-4", **attention, **options)(*qkv(1, 1, 30, d=2))


def by_definition(tokens, number, first):
    places = [first]
    while len(places) < number:
        distance = torch.stack([(tokens - tokens[place]).square().sum(1) for place in places]).amin(0)
        places.append(int(distance.argmax()))
    return tokens[places]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_each_is_the_farthest_from_those_before(masked, of_keys):
    query, tokens, _ = qkv(2, 3, 50, d=4)
    mask = random_mask(2, 50, share=0.7) if masked else None
    if masked:
        query, tokens = (torch.where(mask[:, None, :, None], x, 0) for x in (query, tokens))
    found, new = farthest_tokens(tokens, segments(tokens, 9, mask), mask, query if of_keys else None)
    assert new.all()
    for b in range(2):
        real = torch.ones(50, dtype=torch.bool) if mask is None else mask[b]
        for h in range(3):
            own = tokens[b, h, real]
            apart = (own - own.mean(0)).square().sum(1)
            first = int((own @ query[b, h].sum(0)).argmax() if of_keys else apart.argmax())
            torch.testing.assert_close(found[b, h], by_definition(own, 9, first))


def test_equal_tokens_count_once():
    tokens = torch.tensor([1.0, 2.0]).repeat(10).view(1, 1, 20, 1)
    _, new = farthest_tokens(tokens, segments(tokens, 5))
    assert new.tolist() == [[[True, True, False, False, False]]]


def test_a_sink_that_means_would_blur_is_kept():
    """All queries look at one key, whose value is unlike all others."""
    query, key, value = (0.1 * x for x in qkv(1, 2, 200, d=8, e=8))
    key[:, :, 77] = 4 * torch.nn.functional.normalize(torch.ones(8, dtype=key.dtype), dim=0)
    query += 3 * key[:, :, 77:78]
    value[:, :, 77] += 5
    exact = torch.softmax(query @ key.mT * 8**-0.5, dim=-1) @ value
    errors = [
        (nystrom_attention(query, key, value, num_landmarks=16, landmarks=kind) - exact).norm() / exact.norm()
        for kind in ("segment_means", "fps")
    ]
    assert errors[1] < 0.1 * errors[0]
