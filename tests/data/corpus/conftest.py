import pytest
from corpora import texts, write_json_lines, write_vocabulary

from nystromformer.data.corpus.shards import build_corpus
from nystromformer.data.corpus.text import Reading
from nystromformer.data.tokenizers import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(write_vocabulary(tmp_path_factory.mktemp("vocabulary"))))


@pytest.fixture
def make_corpus(tokenizer, tmp_path, monkeypatch):
    """A corpus of some documents, in shards of about 300 tokens."""
    monkeypatch.setattr("nystromformer.data.corpus.shards.CHARACTERS_PER_PIECE", 500)

    def make(documents=None, workers=1, cache=None, **options):
        file = write_json_lines(tmp_path / "documents.jsonl", texts(60) if documents is None else documents)
        content = tokenizer.backend_tokenizer.to_str()
        options = {"tokens_per_shard": 300} | options
        return build_corpus([file], Reading(), content, cache or tmp_path / "cache", workers=workers, **options)

    return make
