"""Synthetic slides, training of their classifiers, and how planted tiles are told from others."""

import numpy as np
import pytest
import torch

from nystromformer.models.mil import TransMIL
from nystromformer.training.slides import SlideTraining, area_under_curve, draw_slide, pad, small_transmil, tile_weights


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


@pytest.fixture
def model() -> TransMIL:
    """With a grid convolution that does something, as after training."""
    torch.manual_seed(0)
    model = small_transmil().eval()
    for parameter in model.pos_layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def test_the_map_has_one_weight_per_tile_of_a_large_slide(model):
    slide = draw_slide(0, 0, 0, (50_000, 50_000), shift=6.0)
    weights = tile_weights(model, slide)
    assert weights.shape == (50_000,)
    assert float(weights.sum()) == pytest.approx(1, abs=0.01)


def test_with_as_many_landmarks_as_tokens_attention_is_exact():
    slide = draw_slide(0, 0, 0, (500, 500), shift=6.0)
    torch.manual_seed(0)
    exact, more = small_transmil(501).eval(), small_transmil(2000).eval()
    more.load_state_dict(exact.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(exact(*pad([slide])), more(*pad([slide])))
    assert tile_weights(exact, slide).min() >= 0, "exact weights are never negative"


def test_a_step_changes_the_model_and_keeps_its_loss():
    training = SlideTraining(small_transmil(), steps=2)
    before = training.model._fc2.weight.clone()
    slides = [draw_slide(0, 0, index, (500, 500), shift=6.0) for index in range(2)]
    training.step(slides)
    training.step(slides)
    assert len(training.losses) == 2
    assert not torch.equal(training.model._fc2.weight, before)


@pytest.mark.parametrize("steps", range(1, 12))
def test_any_number_of_steps_has_a_schedule(steps):
    training = SlideTraining(small_transmil(), steps)
    rates = []
    for _ in range(steps):
        rates.append(training.schedule.get_last_lr()[0])
        training.optimizer.step()
        training.schedule.step()
    assert max(rates) <= training.learning_rate
    assert steps < 3 or max(rates) > 0.8 * training.learning_rate


def test_the_area_under_the_curve_is_that_of_scikit_learn():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    labels, scores = rng.random(200) < 0.1, rng.integers(0, 20, 200)
    assert area_under_curve(labels, scores) == pytest.approx(roc_auc_score(labels, scores))
