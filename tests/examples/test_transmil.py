import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nystromformer.records import Recorder, read_records
from nystromformer.training.slides import evaluate, small_transmil, tile_weights

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import transmil

SMOKE = transmil.Options(bags=4, batch=2, held_out=2, large=2, training_tiles=500, tiles=1000)


def test_a_run_leaves_model_records_and_picture(tmp_path):
    transmil.run(SMOKE, tmp_path)
    small_transmil().load_state_dict(load_file(tmp_path / "model.safetensors"))
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


@pytest.mark.slow(seconds=14)
def test_a_short_training_finds_the_planted_tiles(tmp_path):
    options = transmil.Options(bags=600, training_tiles=1500, shift=8.0)
    with transmil.progress_bar() as bar:
        model = transmil.train(options, Recorder(tmp_path, job="transmil", config={}), bar)
    found = evaluate(model, [options.slide(transmil.HELD_OUT, index) for index in range(60)])
    assert found["accuracy"] >= 0.95
    assert found["tile_auc"] >= 0.99
    assert found["tile_precision"] >= 0.8
    large = options.slide(transmil.PICTURE, 0)
    weights = tile_weights(model, large)
    assert large.planted[np.argsort(-weights)[:50]].mean() >= 0.9
