"""Sentence pairs and masks by ALBERT's rules, as pure functions of (seed, epoch, index)."""

import numpy as np
import pytest
import torch
from corpora import texts
from torch.utils.data import DataLoader

from nystromformer.data.corpus.examples import (
    IGNORED,
    NO_PAIR,
    Masking,
    SpecialTokens,
    in_validation,
    mask_tokens,
    pretraining_examples,
    shortened,
)
from nystromformer.data.corpus.shards import text_hash

SPECIAL = SpecialTokens(cls=2, sep=3, pad=0, mask=4, all=(0, 1, 2, 3, 4), vocab_size=22)
POINT, STONE = 5, 7


@pytest.fixture
def parts(make_corpus):
    def make(documents=None, max_length=32, seed=1, **options):
        return pretraining_examples(make_corpus(documents), SPECIAL, max_length=max_length, seed=seed, **options)

    return make


def unmasked(batch):
    """The ids before they were hidden, (b, n)."""
    return torch.where(batch["labels"] != IGNORED, batch["labels"], batch["input_ids"])


def segments_of(batch, row):
    """The two segments of an example, without special tokens."""
    ids, types = unmasked(batch)[row], batch["token_type_ids"][row]
    ordinary = torch.tensor(SPECIAL.all)
    keep = ~torch.isin(ids, ordinary)
    return [ids[keep & (types == kind)].tolist() for kind in (0, 1)]


def test_batches_depend_on_seed_epoch_and_index_only(parts):
    train, _ = parts()
    whole = train.batch([(2, i) for i in range(8)])
    alone = train.batch([(2, 5)])
    length = alone["input_ids"].shape[1]
    for name in ("input_ids", "token_type_ids", "labels"):
        assert torch.equal(whole[name][5, :length], alone[name][0])
    again, _ = parts()
    assert all(torch.equal(again.batch([(2, i) for i in range(8)])[name], whole[name]) for name in whole)
    other_epoch, other_seed = train.batch([(3, 5)]), parts(seed=2)[0].batch([(2, 5)])
    assert not torch.equal(other_epoch["labels"], alone["labels"])
    assert other_seed["labels"].shape != alone["labels"].shape or not torch.equal(other_seed["labels"], alone["labels"])


def test_workers_make_the_same_batches(parts):
    train, _ = parts()
    keys = [(epoch, index) for epoch in (0, 1) for index in range(12)]
    loaded = [
        list(DataLoader(train, batch_size=4, sampler=keys, num_workers=workers, collate_fn=lambda batch: batch))
        for workers in (0, 2)
    ]
    for alone, shared in zip(*loaded, strict=True):
        assert alone.keys() == shared.keys()
        assert all(torch.equal(alone[name], shared[name]) for name in alone)


def test_examples_fill_the_length_and_padding_is_marked(parts):
    train, _ = parts(texts(60, sentences=40))
    batch = train.batch(range(len(train)))
    lengths = torch.tensor(train.lengths)
    assert torch.equal(batch["attention_mask"].sum(1), lengths)
    assert lengths.max() == batch["input_ids"].shape[1] == 32
    assert (lengths == 32).float().mean() > 0.6, "only a tenth, and the ends of documents, are shorter"
    assert torch.equal(batch["input_ids"] == SPECIAL.pad, ~batch["attention_mask"])
    assert torch.equal(batch["input_ids"][:, 0], torch.full((len(train),), SPECIAL.cls))
    full = np.flatnonzero(train.lengths == 32)[:4].tolist()
    assert "attention_mask" not in train.batch(full), "attention is faster without"


def test_pairs_are_two_parts_of_one_document_in_the_order_that_the_label_says(parts, make_corpus, tokenizer):
    documents = texts(60, sentences=40)
    streams = [tokenizer.encode(text, add_special_tokens=False) for text in documents]
    joined = [" " + " ".join(map(str, stream)) + " " for stream in streams]
    train, _ = parts(documents)
    batch = train.batch(range(len(train)))
    labels = batch["sentence_order_label"].tolist()
    for row, label in enumerate(labels):
        if label == NO_PAIR:
            continue
        first, second = segments_of(batch, row)[:: -1 if label else 1]
        assert first
        assert second
        text = " ".join(map(str, first)), " ".join(map(str, second))
        places = [(stream.find(f" {text[0]} "), stream.rfind(f" {text[1]} ")) for stream in joined]
        assert any(0 <= a < b for a, b in places), "both segments are in one document, the first one before the second"
    swapped = np.mean([label for label in labels if label != NO_PAIR])
    assert 0.35 < swapped < 0.65


def test_segments_are_divided_between_sentences(parts):
    train, _ = parts(texts(60, sentences=6, longest=5), max_length=128)
    batch = train.batch(range(len(train)))
    for row, label in enumerate(batch["sentence_order_label"].tolist()):
        if train.lengths[row] < 32 and label != NO_PAIR and train.chunks.targets[row] == 125:
            for segment in segments_of(batch, row):
                assert segment[-1] == POINT, "nothing was cut, so both segments end a sentence"


def test_one_sentence_says_nothing_about_order(parts):
    documents = [text.split(". ")[0].rstrip(".") + "." for text in texts(80)]
    train, validation = parts(documents)
    for part in (train, validation):
        batch = part.batch(range(len(part)))
        assert batch["sentence_order_label"].tolist() == [NO_PAIR] * len(part)
        assert not batch["token_type_ids"].any()


def test_no_token_of_an_endless_sentence_is_lost(parts):
    words = " ".join(["stone"] * 500)
    documents = [f"Light. {words}. River {number}." for number in range(40)]
    train, _ = parts(documents)
    held = train.corpus.documents - int(
        in_validation(np.concatenate([s.hashes for s in train.corpus.shards]), 0.2).sum()
    )
    batch = train.batch(range(len(train)))
    assert int((unmasked(batch) == STONE).sum()) == 500 * held
    assert train.lengths.max() <= 32


def test_a_tenth_of_the_targets_is_shortened(parts):
    train, _ = parts(texts(400, sentences=60))
    pairs = train.chunks.are_pairs
    short = (train.chunks.targets[pairs] < 29).mean()
    assert 0.06 < short < 0.14
    assert train.chunks.targets.min() >= 2


def test_cuts_do_not_tell_the_order():
    rng = np.random.default_rng(0)
    for lengths in ((30, 10), (10, 30), (20, 20), (1, 50)):
        cut = [shortened(lengths, 25, rng) for _ in range(2000)]
        assert all(sum(stop - start for start, stop in kept) == 25 for kept in cut)
        assert all(stop - start >= 1 and start >= 0 for kept in cut for start, stop in kept)
        fronts = np.mean([[start for start, _ in kept] for kept in cut], axis=0)
        backs = np.mean([[n - stop for n, (_, stop) in zip(lengths, kept, strict=True)] for kept in cut], axis=0)
        np.testing.assert_allclose(fronts, backs, atol=0.5)


def test_masks_follow_the_shares():
    ids = np.tile(np.arange(5, 1005), 20)
    maskable = np.ones(len(ids), dtype=bool)
    maskable[::10] = False
    masking = Masking(mask_id=4, vocabulary=np.arange(5, 30000))
    hidden, labels = mask_tokens(ids, maskable, masking, np.random.default_rng(0))
    chosen = labels != IGNORED
    assert chosen.sum() == round(0.15 * maskable.sum())
    assert not chosen[~maskable].any()
    np.testing.assert_array_equal(labels[chosen], ids[chosen])
    np.testing.assert_array_equal(hidden[~chosen], ids[~chosen])
    masked, kept = hidden[chosen] == 4, hidden[chosen] == ids[chosen]
    assert masked.mean() == pytest.approx(0.8, abs=0.02)
    assert kept.mean() == pytest.approx(0.1, abs=0.02)
    assert (~masked & ~kept).mean() == pytest.approx(0.1, abs=0.02)


def test_special_tokens_are_never_hidden_and_never_drawn(parts):
    train, _ = parts(texts(100, sentences=40))
    batch = train.batch([(epoch, index) for epoch in range(3) for index in range(len(train))])
    special = torch.tensor(SPECIAL.all)
    assert not torch.isin(batch["labels"][batch["labels"] != IGNORED], special).any()
    changed = batch["input_ids"][batch["labels"] != IGNORED]
    assert not torch.isin(changed, torch.tensor([0, 1, 2, 3])).any()
    counts = (batch["labels"] != IGNORED).sum(1)
    assert (counts >= 1).all(), "even the shortest example has something to predict"


def test_documents_are_held_out_by_their_text(parts):
    documents = texts(500)
    one, _ = parts(documents, seed=1)
    two, _ = parts(documents[::-1], seed=2)
    hashes = np.array([text_hash(text) for text in documents], dtype=np.uint64)
    held = in_validation(hashes, 0.2)
    assert held.mean() == pytest.approx(0.2, abs=0.05)
    for part in (one, two):
        shards = part.corpus.shards
        documents_used = sum(int((~in_validation(shard.hashes, 0.2)).sum()) for shard in shards)
        assert documents_used == (~held).sum()


def test_validation_is_the_same_for_all_seeds_and_spread_when_some_is_taken(parts):
    first, second = parts(seed=1)[1], parts(seed=2)[1]
    batches = [part.batch(range(len(part))) for part in (first, second)]
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])
    some = first.some(5)
    assert len(some) == 5
    assert some.chunks.starts.tolist() != first.chunks.starts[:5].tolist()
    assert first.some(None) is first


def test_a_corpus_with_one_part_only_is_refused(parts):
    with pytest.raises(ValueError, match="1 documents, and none of them fell to the .* part: give more documents"):
        parts(texts(1))
