"""Synthetic slides: pure functions of their arguments, with what they promise planted in them."""

import pytest
import torch

from nystromformer.data.slides import draw_slide, pad


def test_slides_are_what_they_promise():
    slide, again = (draw_slide(3, 1, 4, (2000, 10_000), shift=6.0) for _ in range(2))
    assert torch.equal(slide.features, again.features)
    assert 2000 <= len(slide.features) <= 10_000
    assert len(slide.cells.unique(dim=0)) == len(slide.cells) == len(slide.features)
    assert 0.002 <= slide.planted.mean() <= 0.0101
    assert not draw_slide(3, 1, 5, (2000, 10_000), shift=6.0).positive
    planted, others = slide.features[slide.planted].mean(0), slide.features[~slide.planted].mean(0)
    assert float((planted - others).norm()) == pytest.approx(6.0, abs=1.5)


def test_padding_says_which_tiles_are_real():
    slides = [draw_slide(0, 0, index, (size, size), shift=6.0) for index, size in enumerate((700, 450))]
    features, mask, cells = pad(slides)
    assert mask.sum(dim=1).tolist() == [700, 450]
    assert torch.equal(features[1, mask[1]], slides[1].features)
    assert torch.equal(cells[1, mask[1]], slides[1].cells)
    assert pad(slides[:1])[1] is None, "slides of one length need no mask"
