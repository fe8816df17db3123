"""The demo's model: its embeddings, and what is said where its weights are not installed. Passages of guides: prose
alone, in paragraphs, none too short to show what an approximation does."""

from pathlib import Path

import pytest
import torch
from small_bert import write_bert

from nystromformer.demo import search
from nystromformer.demo.search import (
    FEWEST,
    QUESTIONS,
    Encoder,
    Passage,
    guides_folder,
    load_encoder,
    passages_of,
    read_long_document,
    read_passages,
    weights_folder,
)
from nystromformer.errors import UserError
from nystromformer.records import Recorder, read_records

GUIDE = """# Title

First words with a [link](other.md).

| a | table |
|---|---|

```python
code = 1
```

![a picture](x.png)

## Second

`Second` words.
"""


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


def count(text: str) -> int:
    return len(text.split())


def test_prose_alone_is_kept(tmp_path):
    (tmp_path / "guide.md").write_text(GUIDE)
    (passage,) = read_passages(tmp_path, lambda text: 25 * count(text))
    assert passage.title == "guide › Title"
    assert passage.text == "Title. First words with a link.\nSecond. Second words."
    assert read_passages(tmp_path, count) == [], "too short for an approximation"


def test_paragraphs_are_packed_until_they_are_long_enough():
    paragraph = " ".join(["word"] * 90)
    prose = "# One\n\n" + "\n\n".join([paragraph] * 4) + "\n\n# Two\n\n" + "\n\n".join([paragraph] * 4)
    found = list(passages_of("guide", prose, count))
    assert [passage.title for passage in found] == ["guide › One", "guide › Two"]
    assert all(count(passage.text) >= FEWEST for passage in found)


def test_a_short_end_joins_the_passage_before():
    paragraph = " ".join(["word"] * 150)
    prose = "\n\n".join(["# One", paragraph, paragraph, "# Two", "few words"])
    (passage,) = passages_of("guide", prose, count)
    assert passage.text.endswith("Two. few words")


def test_the_guides_of_this_project_are_found():
    passages = read_passages(guides_folder(), count)
    assert len(passages) > 20
    assert {"reliability", "drop-in", "scaling"} <= {passage.title.split(" › ")[0] for passage in passages}
