"""Windows of documents: framed, long enough, divided by document, padded with a mask."""

import numpy as np
import pytest
import torch
from corpora import texts, write_json_lines, write_vocabulary
from transformers import BertTokenizer

from nystromformer.data.corpus.text import Reading
from nystromformer.data.corpus.windows import OF_A_DOCUMENT, read_windows

LENGTH = 24


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return BertTokenizer(str(write_vocabulary(tmp_path_factory.mktemp("vocabulary"))))


@pytest.fixture
def files(tmp_path):
    return [write_json_lines(tmp_path / "a.jsonl", texts(80))]


def read(files, tokenizer, **options):
    given = {"train": 10**6, "held_out": 10**6, "share": 0.3} | options
    return read_windows(files, Reading(), tokenizer, given.pop("max_length", LENGTH), **given)


def test_windows_are_framed_and_long_enough(files, tokenizer):
    train, held_out = read(files, tokenizer)
    assert len(train) > len(held_out) > 0
    for ids in (*train.ids, *held_out.ids):
        assert LENGTH // 2 <= len(ids) <= LENGTH
        assert ids[0] == tokenizer.cls_token_id
        assert ids[-1] == tokenizer.sep_token_id
    assert np.bincount(train.document).max() <= OF_A_DOCUMENT


def test_no_document_is_in_both_parts_whatever_is_asked_for(files, tokenizer):
    train, held_out = read(files, tokenizer)
    assert not set(train.document) & set(held_out.document)
    fewer, same = read(files, tokenizer, train=3)
    assert len(fewer) == 3
    assert same.digest() == held_out.digest()


def test_a_batch_is_padded_with_a_mask_only_where_lengths_differ(files, tokenizer):
    train, _ = read(files, tokenizer)
    order = train.lengths.argsort()
    mixed = train.batch([order[0], order[-1]])
    assert mixed["attention_mask"].sum(dim=1).tolist() == train.lengths[[order[0], order[-1]]].tolist()
    assert torch.equal(mixed["input_ids"] != tokenizer.pad_token_id, mixed["attention_mask"])
    assert set(train.batch([order[0]])) == {"input_ids"}


def test_some_come_from_many_documents(files, tokenizer):
    train, _ = read(files, tokenizer)
    documents = len(set(train.document))
    assert len(set(train.some(documents).document)) == documents


def test_a_corpus_shorter_than_the_length_is_refused(files, tokenizer):
    with pytest.raises(ValueError, match=r"--max-length 5000: none of the documents .* the longest has \d+"):
        read(files, tokenizer, max_length=5000)
