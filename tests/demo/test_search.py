"""The demo's model: its embeddings, and what is said where its weights are not installed."""

import pytest
import torch
from small_bert import write_bert

from nystromformer.demo import search
from nystromformer.demo.guides import Passage
from nystromformer.demo.search import Encoder, load_encoder, read_long_document, weights_folder
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


def test_both_read_a_document_that_is_longer_than_the_positions(encoder, tmp_path):
    recorder = Recorder(tmp_path, job="demo", config={})
    passages = [Passage("a", "the film is good " * 50), Passage("b", "number said " * 50)]
    read_long_document(encoder, passages, 600, 0.1, recorder, lambda label: None)
    exact, ours = read_records(tmp_path)
    assert [exact["attention"], ours["attention"]] == ["standard", search.ATTENTION]
    assert exact["tokens"] == ours["tokens"] == 600
    assert exact["repeats"] >= 3
    assert exact["cosine"] == pytest.approx(1)
    assert ours["cosine"] > 0.9
    assert encoder.model.config.max_position_embeddings == 512, "the model itself stays as it was"


def test_absent_weights_are_one_clear_line(monkeypatch):
    monkeypatch.setattr(search, "WEIGHTS", "no_such_weights")
    with pytest.raises(UserError, match="the weights of MiniLM are not installed: add the package no-such-weights"):
        weights_folder()
