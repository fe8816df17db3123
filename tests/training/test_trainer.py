"""The order of examples is a function of the seed and the epoch, and groups by length."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nystromformer.training.trainer import GroupedByLength, LongestFirst, examples_seen, grouped_order

LENGTHS = np.random.default_rng(0).integers(1, 2000, 10_000)


@given(count=st.integers(1, 300), batch_size=st.integers(1, 40), seed=st.integers(0, 9), epoch=st.integers(0, 9))
def test_each_example_comes_once_an_epoch(count, batch_size, seed, epoch):
    order = grouped_order(LENGTHS[:count], batch_size, seed, epoch)
    assert sorted(order) == list(range(count))


def test_the_order_depends_on_seed_and_epoch_and_nothing_else():
    sampler = GroupedByLength(LENGTHS, 32, seed=3)
    orders = {}
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        order = list(sampler)
        assert orders.setdefault(epoch, order) == order
    assert orders[0] != orders[1]
    assert list(GroupedByLength(LENGTHS, 32, seed=4)) != orders[0]


def test_batches_hold_similar_lengths_and_little_padding():
    order = grouped_order(LENGTHS, 32, seed=0, epoch=0)
    batches = LENGTHS[order[: 32 * 312]].reshape(-1, 32)
    assert batches.sum() / (32 * batches.max(axis=1).sum()) > 0.95
    at_random = LENGTHS[: 32 * 312].reshape(-1, 32)
    assert at_random.sum() / (32 * at_random.max(axis=1).sum()) < 0.6


def test_batches_come_in_no_order_of_length():
    means = LENGTHS[grouped_order(LENGTHS, 32, seed=0, epoch=0)[: 32 * 312]].reshape(-1, 32).mean(axis=1)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.2


def test_evaluation_takes_the_longest_first():
    order = list(LongestFirst(LENGTHS[:100]))
    assert sorted(order) == list(range(100))
    assert (np.diff(LENGTHS[order]) <= 0).all()


@pytest.mark.parametrize("steps, seen", [(0, 0), (1, 4), (3, 10), (4, 14), (7, 24)])
def test_a_smaller_last_batch_counts_as_it_is(steps, seen):
    assert examples_seen(steps, batch_size=4, examples=10) == seen
