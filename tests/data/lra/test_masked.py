"""Masked examples: which tokens are masked, and what becomes of them."""

import numpy as np
import pytest
import torch

from nystromformer.data.lra.examples import Examples, Sequences
from nystromformer.data.lra.masked import MASK, UNMASKED, MaskedExamples


@pytest.fixture(scope="module")
def examples():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, length).astype(np.uint8).tobytes() for length in (900, 400, 1000, 7)]
    return Examples((Sequences.of(texts),), np.arange(4))


def restored(batch):
    return torch.where(batch["labels"] == UNMASKED, batch["input_ids"], batch["labels"])


def test_masked_tokens_are_asked_for_and_nothing_else_is_changed(examples):
    masked = MaskedExamples(examples, share=0.3, seed=1)
    batch, plain = masked.__getitems__([(0, 0), (0, 1), (0, 3)]), examples.batch([0, 1, 3])
    asked = batch["labels"] != UNMASKED
    assert torch.equal(restored(batch), plain["input_ids"])
    assert torch.equal(batch["attention_mask"], plain["attention_mask"])
    assert (batch["input_ids"][asked] == MASK).all()
    assert not asked[~plain["attention_mask"]].any(), "padding is never asked for"
    assert asked.sum() / plain["attention_mask"].sum() == pytest.approx(0.3, abs=0.05)


def test_a_token_is_masked_by_seed_epoch_and_index_alone(examples):
    masked = MaskedExamples(examples, share=0.5, seed=1)
    alone = masked[2, 1]["labels"][0]
    padded = masked.__getitems__([(2, 2), (2, 1)])["labels"][1]
    assert torch.equal(padded[: len(alone)], alone), "whatever it is padded to"
    assert (padded[len(alone) :] == UNMASKED).all()
    for other in (masked[3, 1], MaskedExamples(examples, share=0.5, seed=2)[2, 1]):
        assert not torch.equal(other["labels"][0], alone)
    assert torch.equal(masked[1]["labels"], masked[0, 1]["labels"]), "without an epoch, as in evaluations: the first"


def test_pairs_are_masked_on_both_sides(examples):
    pairs = Examples((examples.parts[0], examples.parts[0]), examples.labels)
    batch = MaskedExamples(pairs, share=0.5, seed=1).__getitems__([(0, 0), (0, 3)])
    assert batch["labels"].shape == (2, 2, 900)
    assert torch.equal(restored(batch), pairs.batch([0, 3])["input_ids"])
    assert not torch.equal(batch["labels"][0, 0], batch["labels"][0, 1])
    assert pairs.tokens.tolist() == [1800, 800, 2000, 14]
    assert pairs.choose(np.array([3])).tokens.tolist() == [14]
