"""The demo's model: its embeddings, and what is said where its weights are not installed."""

from pathlib import Path

import pytest
import torch
from small_bert import write_bert

from nystromformer.demo import search
from nystromformer.demo.guides import Passage
from nystromformer.demo.search import QUESTIONS, Encoder, load_encoder, read_long_document, weights_folder
from nystromformer.errors import UserError
from nystromformer.records import Recorder, read_records


@pytest.fixture
def encoder(tmp_path) -> Encoder:
    return load_encoder(write_bert(tmp_path / "bert", max_position_embeddings=512))


def test_embeddings_do_not_depend_on_their_batch(encoder):
    texts = ["the film is good", "the film is number said the film is bad", "good"]
    together, alone = encoder.embed(texts), torch.cat([encoder.embed([text]) for text in texts])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(3))


@pytest.mark.slow
def test_questions_find_the_same_passages_of_a_real_model(minilm, tmp_path):
    """Each passage has all questions in it and one of them many times, on 263 to 503 tokens, so that all passages are
    approximated. Cosines are the same to six digits with AVX-512, AVX2 and neither."""
    every = " ".join(QUESTIONS)
    passages = [Passage(f"about {number}", f"{every} {f'{q} ' * 20}") for number, q in enumerate(QUESTIONS)]
    search.search(load_encoder(Path(minilm)), passages, Recorder(tmp_path, job="demo", config={}), lambda label: None)
    cosine, *answers = read_records(tmp_path)
    assert [answer["exact"] for answer in answers] == [passage.title for passage in passages]
    assert [answer["ours"] for answer in answers] == [passage.title for passage in passages]
    assert 0.99 < cosine["worst"] < cosine["value"] < 0.9999, "an approximation: near, and not the same"


def test_both_read_a_document_that_is_longer_than_the_positions(tmp_path):
    """Its cosine is .99688 with AVX-512, AVX2 and neither: weights this large make attention that is far from even."""
    encoder = load_encoder(write_bert(tmp_path / "bert", max_position_embeddings=512, initializer_range=1.0))
    recorder = Recorder(tmp_path, job="demo", config={})
    passages = [Passage("a", "the film is good " * 50), Passage("b", "number said " * 50)]
    read_long_document(encoder, passages, 600, 0.1, recorder, lambda label: None)
    exact, ours = read_records(tmp_path)
    assert [exact["attention"], ours["attention"]] == ["standard", search.ATTENTION]
    assert exact["tokens"] == ours["tokens"] == 600
    assert exact["repeats"] >= 3
    assert exact["cosine"] == pytest.approx(1)
    assert 0.99 < ours["cosine"] < 0.999, "an approximation: near, and not the same"
    assert encoder.model.config.max_position_embeddings == 512, "the model itself stays as it was"


def test_absent_weights_are_one_clear_line(monkeypatch):
    monkeypatch.setattr(search, "WEIGHTS", "no_such_weights")
    with pytest.raises(UserError, match="the weights of MiniLM are not installed: add the package no-such-weights"):
        weights_folder()
