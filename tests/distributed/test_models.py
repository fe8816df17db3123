"""Encoders, heads and layers on shards equal those of one process, in inference and after steps of training."""

import pytest
import torch
from ranks import run_on_ranks
from sharded_models import ENCODERS, SPLITS, TRAINED, in_one_process, million_tokens, on_ranks

TOKEN_LOSSES = ("token-loss", "token-and-sequence-loss")
SEQUENCE_LOSSES = (
    "sequence-loss",
    "sequence-loss-mean-pooling",
    "gradient-checkpointing",
    "distributed-data-parallel",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_on_ranks(on_ranks, 3, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected():
    return in_one_process()


def assert_same(found, expected, tolerance=1e-10):
    assert found.keys() == expected.keys()
    for what, x in expected.items():
        torch.testing.assert_close(found[what], x, rtol=tolerance, atol=tolerance, msg=lambda m, w=what: f"{w}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_gives_the_same_tokens_and_pooled_vector_on_every_rank(results, expected, split, name):
    for rank in range(3):
        assert_same(results[rank][f"{split}-{name}"], expected[name])


@pytest.mark.parametrize("split", SPLITS)
def test_a_layer_gives_the_same_output_and_gradient(results, expected, split):
    for rank in range(3):
        assert_same(results[rank][f"{split}-layer"], expected["layer"])


@pytest.mark.parametrize("split", TRAINED)
@pytest.mark.parametrize("name", [*SEQUENCE_LOSSES, *TOKEN_LOSSES])
def test_training_on_shards_gives_the_weights_of_one_process(results, expected, split, name):
    runs = [dict(results[rank][f"{split}-{name}"]) for rank in range(3)]
    losses = torch.stack([run.pop("losses") for run in runs])
    loss = losses.sum(dim=0) if name in TOKEN_LOSSES else losses[0]  # of own tokens, or the same on every rank
    weights = dict(expected[name])
    torch.testing.assert_close(loss, weights.pop("losses"))
    for run in runs:
        assert_same(run, weights, tolerance=1e-7)  # losses are computed in float32, whatever the model


def test_leaving_the_block_gives_the_module_its_own_ways_back(results, expected):
    assert_same(results[0]["removed"], expected["cls"])


def test_the_example_of_a_million_tokens_runs_on_fewer(tmp_path):
    first, second = run_on_ranks(million_tokens, 2, tmp_path, 3001)
    assert first.startswith("3,001 tokens on 2 ranks, 2 layers of width 32\nrank 0: 1,501 tokens in ")
    assert second.startswith("rank 1: 1,500 tokens in ")
    assert first.split(";")[1] == second.split(";")[1]  # the pooled vector
