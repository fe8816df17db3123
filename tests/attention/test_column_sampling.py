import pytest
import torch

from nystromformer.attention import sampled_softmax_approximation


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
