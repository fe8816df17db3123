"""Batches: padded to the longest of the batch, and no token taken for padding; which tokens are masked."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from nystromformer.data.lra.examples import MASK, UNMASKED, Examples, MaskedExamples, Sequences, as_is, hold_out

TEXTS = [bytes(range(length)) for length in (5, 3, 9, 1, 3)]
EXAMPLES = Examples((Sequences.of(TEXTS),), np.arange(5))


def test_batches_are_padded_to_their_own_longest():
    batch = EXAMPLES.batch([0, 1])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]
    assert batch["attention_mask"].tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert batch["labels"].tolist() == [0, 1]
    assert EXAMPLES.lengths.tolist() == [5, 3, 9, 1, 3]


def test_the_value_zero_is_a_token_and_only_the_released_way_hides_it():
    from dataclasses import replace

    assert EXAMPLES.batch([3])["input_ids"].tolist() == [[1]]
    assert "attention_mask" not in EXAMPLES.batch([1, 4])
    released = replace(EXAMPLES, zero_is_padding=True).batch([1, 4])
    assert released["input_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert released["attention_mask"].tolist() == [[False, True, True]] * 2


def test_a_loader_takes_whole_batches_with_and_without_workers():
    for workers in (0, 1):
        loader = DataLoader(EXAMPLES, batch_size=2, collate_fn=as_is, num_workers=workers)
        assert [batch["labels"].tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_examples_are_chosen_by_position():
    chosen = EXAMPLES.choose(np.array([4, 2])).choose(slice(1, None))
    assert len(chosen) == 1
    assert chosen.lengths.tolist() == [9]
    assert chosen[0]["labels"].tolist() == [2]


def test_some_is_the_same_choice_each_time():
    labels = [EXAMPLES.some(3).batch(range(3))["labels"] for _ in range(2)]
    assert torch.equal(*labels)
    assert EXAMPLES.some(None) is EXAMPLES.some(5) is EXAMPLES


@pytest.mark.parametrize("count", [1, 4])
def test_what_is_held_out_is_not_in_the_rest(count):
    rest, held_out = hold_out(EXAMPLES, count)
    parts = [part.batch(range(len(part)))["labels"].tolist() for part in (rest, held_out)]
    assert len(parts[1]) == count
    assert sorted(parts[0] + parts[1]) == [0, 1, 2, 3, 4]


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
