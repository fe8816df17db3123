import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nystromformer.records import Recorder, read_records

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import synthetic_slides
import transmil
from synthetic_slides import draw_slide, pad

SMOKE = transmil.Options(bags=4, batch=2, held_out=2, large=2, training_tiles=500, tiles=1000)


@pytest.fixture
def model() -> transmil.TransMIL:
    """In float64, with a grid convolution that does something, as after training."""
    torch.manual_seed(0)
    model = transmil.TransMIL().double().eval()
    for parameter in model.grid.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture
def bags() -> list[synthetic_slides.Slide]:
    """Slides of different lengths, one of them with fewer tiles than landmarks."""
    sizes = (700, 30, 450)
    return [draw_slide(0, 0, index, (size, size), shift=6.0) for index, size in enumerate(sizes)]


def in_float64(features: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return features.double(), *others


def test_slides_are_what_they_promise():
    slide, again = (draw_slide(3, 1, 4, (2000, 10_000), shift=6.0) for _ in range(2))
    assert torch.equal(slide.features, again.features)
    assert 2000 <= len(slide.features) <= 10_000
    assert len(slide.cells.unique(dim=0)) == len(slide.cells) == len(slide.features)
    assert 0.002 <= slide.planted.mean() <= 0.0101
    assert not draw_slide(3, 1, 5, (2000, 10_000), shift=6.0).positive
    planted, others = slide.features[slide.planted].mean(0), slide.features[~slide.planted].mean(0)
    assert float((planted - others).norm()) == pytest.approx(6.0, abs=1.5)


def test_a_bag_gives_the_same_alone_and_padded_in_a_batch(model, bags):
    features, cells, mask = in_float64(*pad(bags))
    features = features.masked_fill(~mask[..., None], torch.nan)
    with torch.no_grad():
        together, maps = model(features, cells, mask), model.attention_map(features, cells, mask)
        alone = torch.cat([model(*in_float64(*pad([bag]))) for bag in bags])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-9)
    for bag, row in zip(bags, maps, strict=True):
        expected = model.attention_map(*in_float64(*pad([bag])))[0]
        torch.testing.assert_close(row[: len(expected)], expected, rtol=0, atol=1e-9)
        assert (row[len(expected) :] == 0).all()


def test_the_grid_convolution_is_the_sum_of_its_three_on_the_grid(model, bags):
    tokens = torch.randn(1, len(bags[0].cells), 64, dtype=torch.float64)
    cells, rows, columns = bags[0].cells[None], *bags[0].cells.T
    grid = torch.zeros(1, 64, 60, 60, dtype=torch.float64)
    grid[0, :, rows, columns] = tokens[0].T
    expected = tokens[0] + sum(conv(grid) for conv in model.grid.convolutions)[0, :, rows, columns].T
    found = model.grid(tokens, cells, torch.ones(1, len(rows), dtype=torch.bool))
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-9)


def test_the_map_of_a_small_bag_is_the_softmax_row_of_the_cls_token(model, bags):
    batch = in_float64(*pad([bags[1]]))
    tokens = model.last_norm(model.tokens(*batch)[0])[0]
    query, key = (
        project(tokens).unflatten(1, (4, 16)).transpose(0, 1) for project in (model.last.query, model.last.key)
    )
    expected = torch.softmax(query[:, :1] @ key.mT / 4, dim=-1)[:, 0, 1:].mean(0)
    torch.testing.assert_close(model.attention_map(*batch)[0], expected, rtol=0, atol=1e-9)


def test_the_map_has_one_weight_a_tile_of_a_large_slide(model):
    slide = draw_slide(0, 0, 0, (50_000, 50_000), shift=6.0)
    weights = model.float().attention_map(*pad([slide]))
    assert weights.shape == (1, 50_000)
    assert float(weights.sum()) == pytest.approx(1, abs=0.01)


def test_a_run_leaves_model_records_and_picture(tmp_path):
    transmil.run(SMOKE, tmp_path)
    transmil.TransMIL().load_state_dict(load_file(tmp_path / "model.safetensors"))
    metrics = {record["metric"] for record in read_records(tmp_path)}
    assert metrics >= {"training_loss", "training_time", "accuracy", "auc", "tile_auc", "tile_precision", "map_time"}
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_training_is_determined_by_the_seed(tmp_path):
    def trained(seed: int) -> torch.Tensor:
        with transmil.progress_bar() as bar:
            recorder = Recorder(tmp_path, job="transmil", config={})
            return transmil.train(replace(SMOKE, seed=seed), recorder, bar).head.weight

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
    weights = model.attention_map(*pad([large]))[0].numpy()
    assert large.planted[np.argsort(-weights)[:50]].mean() >= 0.9
