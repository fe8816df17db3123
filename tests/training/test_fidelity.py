"""How closely one model follows another: neighbors, cosines and errors, in the order of the texts."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from nystromformer.data.corpus.windows import Windows
from nystromformer.training.fidelity import closeness, read_texts, seconds_of


@pytest.fixture
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8}
    return BertModel(BertConfig(**sizes, vocab_size=30, max_position_embeddings=16)).eval()


@pytest.fixture
def windows():
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, 30, length) for length in (9, 4, 12, 7, 12)]
    return Windows(ids, np.arange(5), pad=0, max_length=12)


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_embeddings_are_those_of_each_text_alone(pooling, model, windows):
    together = read_texts(model, windows, pooling, model, batch_size=2, device=torch.device("cpu"))
    with torch.no_grad():
        states = [model(torch.tensor(ids)[None]).last_hidden_state[0] for ids in windows.ids]
    pooled = torch.stack([state.mean(dim=0) if pooling == "mean" else state[0] for state in states])
    torch.testing.assert_close(together.embeddings, torch.nn.functional.normalize(pooled, dim=1))
    assert together.errors == [0.0, 0.0]


def test_agreement_counts_neighbors():
    exact = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]]), dim=1)
    assert closeness(exact, exact)["top_1"] == 1
    swapped = exact[[0, 2, 1, 3]]
    found = closeness(exact, swapped)
    assert found["top_1"] == 0
    assert found["worst"] == pytest.approx((exact[1] * exact[2]).sum().item())
    assert closeness(exact[:1], exact[:1]).keys() == {"cosine", "worst"}


def test_times_are_positive(model, windows):
    assert min(seconds_of({"one": model, "two": model}, windows.batch([0])).values()) > 0
