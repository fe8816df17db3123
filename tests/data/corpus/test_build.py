"""Shards: made once, in parallel, whole or absent, made anew when anything changes."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
from corpora import texts, write_json_lines
from real_data import REAL_DATA, needs_real_data

from nystromformer.data.corpus.shards import build_corpus, corpus_tokenizer, open_corpus, text_hash
from nystromformer.data.corpus.text import Reading, split_sentences


def rebuilt(*_, **__):
    raise AssertionError("it was made again")


def test_shards_hold_the_tokens_of_every_sentence(make_corpus, tokenizer):
    documents = texts(60)
    corpus = make_corpus(documents)
    assert len(corpus.shards) > 2
    assert corpus.documents == 60
    found = []
    for shard in corpus.shards:
        assert shard.ids.dtype == np.uint16
        for document, last in enumerate(shard.document_ends):
            first = shard.document_ends[document - 1] if document else 0
            bounds = [shard.sentence_ends[i - 1] if i else 0 for i in range(first, last + 1)]
            sentences = [shard.ids[a:b].tolist() for a, b in pairwise(bounds)]
            found.append((sentences, int(shard.hashes[document])))
    encode = lambda sentence: tokenizer.encode(sentence, add_special_tokens=False)
    assert found == [([encode(s) for s in split_sentences(text)], text_hash(text)) for text in documents]
    assert corpus.tokens == sum(len(sentence) for sentences, _ in found for sentence in sentences)


def test_shards_are_mapped_not_read(make_corpus):
    for shard in make_corpus().shards:
        assert not shard.ids.flags.writeable
        assert not shard.ids.flags.owndata


def test_special_tokens_in_a_text_are_text_and_tokenizers_that_cut_do_not(make_corpus, tokenizer, tmp_path):
    cutting = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    cutting.enable_truncation(2)
    cutting.enable_padding(length=8)
    file = write_json_lines(tmp_path / "a.jsonl", ["Stone [MASK] river [SEP] bread."])
    corpus = build_corpus([file], Reading(), cutting.to_str(), tmp_path / "cache", workers=1)
    tokens = tokenizer.convert_ids_to_tokens(corpus.shards[0].ids.tolist())
    assert tokens[0] == "stone"
    assert tokens[-2:] == ["bread", "."]
    assert not set(tokens) & {"[MASK]", "[SEP]", "[PAD]"}


@pytest.mark.slow
def test_the_number_of_workers_changes_nothing(make_corpus, tmp_path):
    shares = []
    one = make_corpus(cache=tmp_path / "one", report=shares.append)
    two = make_corpus(cache=tmp_path / "two", workers=2)
    assert one.digest == two.digest
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_corpus_is_reused_while_nothing_changes(make_corpus, tokenizer, tmp_path, monkeypatch):
    first = make_corpus()
    file, cache, content = tmp_path / "documents.jsonl", tmp_path / "cache", tokenizer.backend_tokenizer.to_str()
    with monkeypatch.context() as patched:
        patched.setattr("nystromformer.data.corpus.shards._make", rebuilt)
        assert build_corpus([file], Reading(), content, cache).digest == first.digest
        changes = {
            "tokenizer": lambda: build_corpus([file], Reading(), content.replace("stone", "stones"), cache),
            "reading": lambda: build_corpus([file], Reading(division="file"), content, cache),
            "files": lambda: build_corpus([file, file], Reading(), content, cache),
        }
        for build in changes.values():
            with pytest.raises(AssertionError, match="made again"):
                build()
        file.write_text(file.read_text() + '{"text": "One more."}\n')
        with pytest.raises(AssertionError, match="made again"):
            build_corpus([file], Reading(), content, cache)
    again = build_corpus([file], Reading(), content, cache, workers=1)
    assert again.documents == first.documents + 1
    assert again.digest != first.digest
    assert open_corpus(first.folder).digest == first.digest


def test_nothing_is_left_of_a_corpus_that_failed(make_corpus, tmp_path, monkeypatch):
    def no_space(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("nystromformer.data.corpus.shards.write_shard", no_space)
        with pytest.raises(OSError, match="No space left"):
            make_corpus()
    assert [path.name for path in (tmp_path / "cache").glob("*") if not path.name.endswith(".lock")] == []
    (tmp_path / "cache" / ".corpus-0.unfinished").mkdir(parents=True)
    assert make_corpus().documents == 60


def test_an_empty_corpus_is_refused(make_corpus, tmp_path, tokenizer):
    with pytest.raises(ValueError, match="the corpus is empty: no document with text in .*documents.jsonl"):
        make_corpus([" ", ""])
    with pytest.raises(ValueError, match="the corpus is empty"):
        corpus_tokenizer([tmp_path / "documents.jsonl"], Reading(), 100, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").glob("*") if not path.name.endswith(".lock")]


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing", "description"])
def test_a_damaged_shard_is_named_with_the_remedy(make_corpus, damage):
    corpus = make_corpus()
    folder = corpus.folder
    path = folder / ("corpus.json" if damage == "description" else "shard-00001.arrow")
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "changed":
        ids = corpus.shards[1].ids[:20].tobytes()
        content[content.index(ids) + 4] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=rf"{path.name}: damaged \(.*remove the folder .*{folder.name} and run again"):
        open_corpus(folder)


def test_a_copy_in_another_process_maps_the_same_files(make_corpus):
    corpus = make_corpus()
    packed = pickle.dumps(corpus)
    assert len(packed) < 1000
    copy = pickle.loads(packed)  # noqa: S301 - what a worker process is given
    assert copy.digest == corpus.digest
    np.testing.assert_array_equal(copy.shards[1].ids, corpus.shards[1].ids)


def test_a_trained_tokenizer_is_kept(tmp_path, monkeypatch):
    file = write_json_lines(tmp_path / "a.jsonl", texts(30))
    shares = []
    first = corpus_tokenizer([file], Reading(), 60, tmp_path / "cache", shares.append)
    assert shares[-1] == 1.0
    monkeypatch.setattr("nystromformer.data.corpus.shards._train", rebuilt)
    again = corpus_tokenizer([file], Reading(), 60, tmp_path / "cache")
    assert again.get_vocab() == first.get_vocab()
    assert again.tokenize("The stone") == first.tokenize("The stone")
    with pytest.raises(AssertionError, match="made again"):
        corpus_tokenizer([file], Reading(), 61, tmp_path / "cache")


@needs_real_data
def test_real_articles_are_read():
    from nystromformer.data.corpus.shards import texts_of
    from nystromformer.data.corpus.text import corpus_files

    files = corpus_files([str(REAL_DATA / "wikipedia")])
    found = [text for text, _ in texts_of(files, Reading())]
    assert len(found) == 17_685
    assert 15 < np.mean([len(text) / len(split_sentences(text)) for text in found[:200]]) < 200
