"""Batches: padded to the longest of the batch, and no token taken for padding."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from nystromformer.data.lra.examples import Examples, Sequences, as_is, hold_out

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
