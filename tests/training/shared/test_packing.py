"""Packed batches: which examples a step has is a function of the seed and the epoch, and a run resumes exactly."""

from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from training_runs import TRAIN, Killed, make_trainer

from nystromformer.data.lra.examples import Examples, Sequences
from nystromformer.training.run import train
from nystromformer.training.shared.packing import PackedBatches, PackedOrder, packed_batches

TOKENS = np.random.default_rng(0).integers(1, 200, 1_000)


@given(count=st.integers(1, 300), shares=st.integers(1, 4), seed=st.integers(0, 9), epoch=st.integers(0, 9))
def test_each_example_comes_once_an_epoch_and_no_batch_is_empty(count, shares, seed, epoch):
    tokens = TOKENS[:count]
    per_step = int(tokens.max()) * shares
    if shares * -(-tokens.sum() // per_step) > count:
        return
    order = PackedOrder(tokens, per_step, shares, seed)
    order.set_epoch(epoch)
    batches = list(order)
    assert len(batches) == len(order)
    assert len(order) % shares == 0
    assert all(batches)
    assert sorted(position for batch in batches for position in batch) == list(range(count))


def test_batches_have_about_as_many_tokens():
    order = PackedOrder(TOKENS, 2_000, 1, seed=0)
    sizes = np.array([TOKENS[list(batch)].sum() for batch in order])
    assert sizes.mean() <= 2_000
    assert len(sizes) - 1 < TOKENS.sum() / 2_000 <= len(sizes)
    assert abs(sizes - sizes.mean()).max() < TOKENS.max()


def test_the_order_depends_on_seed_and_epoch_and_nothing_else():
    order = PackedOrder(TOKENS, 2_000, 1, seed=3)
    found = {}
    for epoch in (0, 1, 0):
        order.set_epoch(epoch)
        assert found.setdefault(epoch, list(order)) == list(order)
    assert found[0] != found[1]
    assert list(PackedOrder(TOKENS, 2_000, 1, seed=4)) != found[0]
    lengths = [TOKENS[list(batch)].mean() for batch in found[0]]
    assert np.std(lengths) < 30, "by chance, not by length"


def test_what_steps_have_seen_is_counted():
    order = PackedOrder(TOKENS, 2_000, 2, seed=3)
    per_epoch = len(order) // 2
    assert order.seen(0) == (0, 0)
    assert order.seen(per_epoch) == (1_000, TOKENS.sum())
    order.set_epoch(1)
    begun = [position for batch in list(order)[:6] for position in batch]
    assert order.seen(per_epoch + 3) == (1_000 + len(begun), TOKENS.sum() + TOKENS[begun].sum())


def test_examples_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"--packed 300: must be at least 398, 2 times the longest example's tokens"):
        PackedOrder(TOKENS, 300, 2, seed=0)
    with pytest.raises(ValueError, match=r"--packed 600: 2 examples for 3 batches of an epoch, 3 per step"):
        PackedOrder(TOKENS[:2], 600, 3, seed=0)


def test_an_example_longer_than_a_part_leaves_no_batch_empty():
    for tokens in ([100, 1, 1, 1], [1, 1, 100, 1], [100, 100, 1]):
        assert [len(batch) for batch in packed_batches(np.array(tokens), len(tokens), 0, 0)] == [1] * len(tokens)


@pytest.mark.parametrize("pair", [False, True], ids=["single", "pair"])
def test_packed_examples_are_those_of_the_padded_batch(pair):
    sequences = Sequences.of([b"abc", b"d", b"efgh"]), Sequences.of([b"i", b"jk", b"lmn"])
    examples = Examples(sequences if pair else sequences[:1], np.array([0, 1, 2])).choose(np.array([2, 0, 1]))
    padded, packed = examples.batch([1, 2]), PackedBatches(examples).__getitems__([(1,), (2,)])
    assert torch.equal(packed["labels"], padded["labels"])
    row, borders = packed["input_ids"][0], packed["cu_seq_lens_q"]
    assert torch.equal(row, padded["input_ids"][padded["attention_mask"]])
    lengths = padded["attention_mask"].flatten(0, -2).sum(1)
    assert borders.diff().tolist() == lengths.tolist()
    assert borders.dtype == torch.int32
    with pytest.raises(ValueError, match="zero_is_padding=True with packed examples: must be False"):
        Examples(sequences[:1], np.array([0, 1, 2]), zero_is_padding=True).packed([0])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 2}, {"dataloader_num_workers": 1}], ids=str)
def test_a_killed_run_resumes_to_the_same_weights_within_an_epoch(tmp_path, settings):
    made = {"packed": 400, **settings}
    whole = make_trainer(tmp_path / "whole", **made)
    train(whole)
    assert whole.packing.seen(16)[0] == sum(len(batch) for batch in batches_of(whole, 16))
    with suppress(Killed):
        train(make_trainer(tmp_path / "killed", kill_at=11, **made))
    train(make_trainer(tmp_path / "killed", **made))
    weights = [load_file(tmp_path / run / "checkpoint-16" / "model.safetensors") for run in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def batches_of(trainer, steps):
    """Those of the first steps, in order."""
    order, found = PackedOrder(TRAIN.tokens, 400, trainer.args.gradient_accumulation_steps, 5), []
    for epoch in range(steps):
        order.set_epoch(epoch)
        found += list(order)
    return found[: steps * trainer.args.gradient_accumulation_steps]


def test_training_sees_the_batches_of_the_order(tmp_path, monkeypatch):
    seen, trainer = (
        [],
        make_trainer(tmp_path, packed=400, max_steps=9, eval_strategy="no", load_best_model_at_end=False),
    )
    original = type(trainer).training_step

    def note(self, model, inputs, *args, **kwargs):
        seen.append(inputs["input_ids"].clone())
        return original(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(type(trainer), "training_step", note)
    trainer.train()
    expected = [TRAIN.packed(batch)["input_ids"] for batch in batches_of(trainer, 9)]
    assert len(trainer.packing) < 9, "more than an epoch"
    assert all(torch.equal(x, y) for x, y in zip(seen, expected, strict=True))
