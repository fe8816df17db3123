"""No tensor of n×m or n×s elements is kept or made, forward or backward."""

import pytest
import torch
from largest_tensor import Largest, saved_sizes

from nystromformer import nystrom_attention

BATCH, HEADS, LENGTH, WIDTH, LANDMARKS = 1, 2, 2048, 8, 64
LIMIT = BATCH * HEADS * LENGTH * LANDMARKS  # what one n×m matrix for each head holds


def inputs(e=WIDTH, s=LENGTH):
    shapes = [(BATCH, HEADS, LENGTH, WIDTH), (BATCH, HEADS, s, WIDTH), (BATCH, HEADS, s, e)]
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("landmarks", ["segment_means", "kmeans"])
@pytest.mark.parametrize("e", [WIDTH, 2 * WIDTH, WIDTH // 2])
@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
def test_nothing_of_n_by_m_elements_is_made_or_saved(landmarks, e, masked):
    query, key, value = inputs(e)
    kernel = torch.randn(HEADS, 33).requires_grad_()
    mask = torch.arange(LENGTH)[None] < LENGTH - 100 if masked else None
    with Largest() as largest:
        with saved_sizes() as saved:
            out = nystrom_attention(
                query, key, value, mask, num_landmarks=LANDMARKS, conv_weight=kernel, landmarks=landmarks
            )
        out.sum().backward()
    assert saved
    assert max(saved) < LIMIT
    assert BATCH * HEADS * LENGTH * WIDTH <= largest.elements < LIMIT


def test_cross_attention_makes_nothing_of_n_by_s_or_s_by_m_elements():
    with Largest() as largest:
        nystrom_attention(*inputs(s=2 * LENGTH), num_landmarks=LANDMARKS).sum().backward()
    assert largest.elements < 2 * LIMIT


def test_this_test_sees_a_matrix_of_n_by_m_elements():
    """The check can fail: the order of the paper's algorithm, with F as a matrix, is caught."""
    query, _, _ = inputs()
    with Largest() as largest:
        torch.softmax(query @ torch.randn(BATCH, HEADS, WIDTH, LANDMARKS), dim=-1)
    assert largest.elements >= LIMIT
