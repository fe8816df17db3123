"""Landmarks of a grid are means over its tiles, and shapes that do not fit are refused."""

import pytest
import torch
from drawn import qkv, random_mask
from torch.nn.functional import avg_pool2d, scaled_dot_product_attention

from nystromformer import build_attention, nystrom_attention
from nystromformer.attention.grid_segments import grid_segments
from nystromformer.attention.landmarks import means_over


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
