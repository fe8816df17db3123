import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nystromformer.models.mil import TransMIL
from nystromformer.records import Recorder, read_records

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import transmil
from synthetic_slides import draw_slide, pad

SMOKE = transmil.Options(bags=4, batch=2, held_out=2, large=2, training_tiles=500, tiles=1000)


@pytest.fixture
def model() -> TransMIL:
    """With a grid convolution that does something, as after training."""
    torch.manual_seed(0)
    model = transmil.new_model().eval()
    for parameter in model.pos_layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


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


def test_the_map_has_one_weight_a_tile_of_a_large_slide(model):
    slide = draw_slide(0, 0, 0, (50_000, 50_000), shift=6.0)
    weights = transmil.tile_weights(model, slide)
    assert weights.shape == (50_000,)
    assert float(weights.sum()) == pytest.approx(1, abs=0.01)


def test_a_run_leaves_model_records_and_picture(tmp_path):
    transmil.run(SMOKE, tmp_path)
    transmil.new_model().load_state_dict(load_file(tmp_path / "model.safetensors"))
    metrics = {record["metric"] for record in read_records(tmp_path)}
    assert metrics >= {"training_loss", "training_time", "accuracy", "auc", "tile_auc", "tile_precision", "map_time"}
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_training_is_determined_by_the_seed(tmp_path):
    def trained(seed: int) -> torch.Tensor:
        with transmil.progress_bar() as bar:
            recorder = Recorder(tmp_path, job="transmil", config={})
            return transmil.train(replace(SMOKE, seed=seed), recorder, bar)._fc2.weight

    assert torch.equal(trained(1), trained(1))
    assert not torch.equal(trained(1), trained(2))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--bags", "0"], "bags=0: must be at least 1"),
        (["--large", "1"], "an AUC needs a positive and a negative slide"),
        (["--tiles", "10"], "smaller slides have no room for clusters"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        transmil.main([*arguments, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_short_training_finds_the_planted_tiles(tmp_path):
    options = transmil.Options(bags=800, training_tiles=1500, shift=8.0)
    with transmil.progress_bar() as bar:
        model = transmil.train(options, Recorder(tmp_path, job="transmil", config={}), bar)
    found = transmil.evaluate(model, [options.slide(transmil.HELD_OUT, index) for index in range(60)])
    assert found["accuracy"] >= 0.95
    assert found["tile_auc"] >= 0.99
    assert found["tile_precision"] >= 0.8
    large = options.slide(transmil.PICTURE, 0)
    weights = transmil.tile_weights(model, large)
    assert large.planted[np.argsort(-weights)[:50]].mean() >= 0.9
