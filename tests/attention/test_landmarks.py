import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nystromformer.attention import kmeans_landmarks, sampled_softmax_approximation, segment_means
from nystromformer.attention.landmarks import means_over, segments
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
