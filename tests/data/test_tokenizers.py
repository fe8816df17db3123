"""Tokenizers given in any of their forms encode as their own library does; those unfit for pretraining are refused."""

import io
import json

import pytest
import sentencepiece
from corpora import SPECIAL, VOCABULARY, texts, write_vocabulary
from real_data import REAL_DATA, needs_real_data
from transformers import AutoTokenizer, BertTokenizer

from nystromformer.data.tokenizers import load_tokenizer, train_tokenizer

TEXT = "The STONE, héllo river; bread!"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_vocabulary_encodes_as_berts_own(tmp_path):
    path = write_vocabulary(tmp_path)
    tokenizer, bert = load_tokenizer(str(path)), BertTokenizer(str(path))
    assert tokenizer(TEXT, "River bread.") == bert(TEXT, "River bread.")
    assert set(tokenizer.all_special_tokens) == set(SPECIAL)
    cased = load_tokenizer(str(write_vocabulary(tmp_path, [*VOCABULARY, "Bread"])))
    assert cased.tokenize("Bread bread") == ["Bread", "bread"]


def test_json_and_folders_encode_the_same(tmp_path):
    tokenizer = load_tokenizer(str(write_vocabulary(tmp_path)))
    tokenizer.save_pretrained(tmp_path / "folder")
    alone = tmp_path / "alone.json"
    alone.write_bytes((tmp_path / "folder" / "tokenizer.json").read_bytes())
    for given in (tmp_path / "folder", tmp_path / "folder" / "tokenizer.json", alone):
        assert load_tokenizer(str(given))(TEXT).input_ids == tokenizer(TEXT).input_ids
        assert load_tokenizer(str(given)).mask_token_id == tokenizer.mask_token_id
    assert AutoTokenizer.from_pretrained(tmp_path / "folder")(TEXT, "b") == tokenizer(TEXT, "b")


@pytest.fixture(scope="module")
def sentencepiece_model():
    def train(**options):
        model = io.BytesIO()
        lines = iter(text.lower() for text in texts(200))
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines, model_writer=model, vocab_size=60, hard_vocab_limit=False, minloglevel=2, **options
        )
        return model.getvalue()

    return train


def test_a_sentencepiece_model_encodes_as_sentencepiece(sentencepiece_model, tmp_path):
    model = sentencepiece_model(control_symbols=["[CLS]", "[SEP]", "[MASK]"], pad_id=3)
    path = tmp_path / "spiece.model"
    path.write_bytes(model)
    tokenizer, theirs = load_tokenizer(str(path)), sentencepiece.SentencePieceProcessor(model_proto=model)
    assert tokenizer.mask_token == "[MASK]"
    for text in texts(20, seed=5):
        ours = tokenizer.encode(text.replace(" ", "  "), add_special_tokens=False)
        assert ours == theirs.encode(text.lower())
    assert tokenizer.decode(tokenizer.encode("stone river.", add_special_tokens=False)) == "stone river."


def test_tokenizers_unfit_for_pretraining_are_refused(sentencepiece_model, tmp_path):
    without_mask = write_vocabulary(tmp_path, [token for token in VOCABULARY if token != "[MASK]"])
    piece = tmp_path / "spiece.model"
    piece.write_bytes(sentencepiece_model(pad_id=3))
    bpe, cut, empty = tmp_path / "bpe.model", tmp_path / "cut.json", tmp_path / "empty"
    bpe.write_bytes(sentencepiece_model(model_type="bpe", pad_id=3))
    cut.write_text(json.dumps({"version": "1.0"}))
    empty.mkdir()
    (tmp_path / "vocab.bin").write_text("")
    cases = {
        without_mask: "has no mask token; masked language modeling on sentence pairs needs mask, cls, sep and pad",
        piece: "has no mask token",
        bpe: r"can't be read \(not a unigram model",
        cut: "cut.json: can't be read",
        empty: "empty: (can't be read|has no vocabulary)",
        tmp_path / "vocab.bin": "a file must end with .txt, .model, .json",
        "nobody/nothing": "nobody/nothing: can't be read .*; give vocab.txt, tokenizer.json or",
    }
    for given, message in cases.items():
        with pytest.raises(ValueError, match=message):
            load_tokenizer(str(given))


def test_training_gives_the_same_tokenizer_each_time():
    trained = [train_tokenizer(texts(100), 80) for _ in range(3)]
    assert len({tokenizer.backend_tokenizer.to_str() for tokenizer in trained}) == 1
    tokenizer = trained[0]
    assert tokenizer.convert_ids_to_tokens(range(5)) == SPECIAL
    assert "".join(tokenizer.tokenize("STONE")).replace("##", "") == "stone"
    assert tokenizer("s", "t").token_type_ids == [0, 0, 0, 1, 1]
    assert len(tokenizer) == 80
    with pytest.raises(ValueError, match="--vocab-size 5: must be at least 6"):
        train_tokenizer(texts(3), 5)


@needs_real_data
def test_real_vocabularies_are_read():
    folder = REAL_DATA / "vocab"
    bert = load_tokenizer(str(folder / "bert-base-uncased-vocab.txt"))
    albert = load_tokenizer(str(folder / "albert-base-v2-spiece.model"))
    assert (len(bert), bert.mask_token_id) == (30_522, 103)
    assert (len(albert), albert.mask_token_id) == (30_000, 4)
    assert bert.tokenize("Héllo world's") == ["hello", "world", "'", "s"]
    assert albert.tokenize("Héllo world's") == ["▁hello", "▁world", "'", "s"]
