"""What each layer bears, and how closely one model follows another: neighbors, cosines and errors, in the order of the
texts."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from nystromformer.data.corpus.windows import Windows
from nystromformer.training.distillation.fidelity import (
    Budget,
    Candidate,
    choose,
    chosen_layers,
    closeness,
    measure_sensitivity,
    read_texts,
    seconds_of,
)


def layer(**candidates):
    return {name: Candidate(name, *figures) for name, figures in candidates.items()}


LAYERS = [
    layer(standard=(0.0, 4.0), local=(0.1, 2.0), nystrom=(0.2, 1.0)),
    layer(standard=(0.0, 4.0), local=(0.1, 2.0), nystrom=(0.9, 1.0)),
    layer(standard=(0.0, 4.0), local=(0.3, 5.0), nystrom=(0.8, 1.0)),
]


@pytest.mark.parametrize(
    "budget, names",
    [
        ("error=0.05", ["standard", "standard", "standard"]),
        ("error=0.15", ["local", "local", "standard"]),
        ("error=0.25", ["nystrom", "local", "standard"]),  # the third is slower with local than exact
        ("error=1", ["nystrom", "nystrom", "nystrom"]),
        ("speed=1", ["standard", "standard", "standard"]),
        ("speed=1.2", ["local", "standard", "standard"]),
        ("speed=1.6", ["nystrom", "local", "standard"]),
        ("speed=4", ["nystrom", "nystrom", "nystrom"]),
    ],
)
def test_a_budget_chooses(budget, names):
    assert choose(LAYERS, Budget.parse(budget)) == names


def test_a_speed_that_no_attention_has_is_refused():
    with pytest.raises(ValueError, match=r"--budget speed=5: .* 4.00 times as fast"):
        choose(LAYERS, Budget.parse("speed=5"))


@pytest.mark.parametrize("text", ["", "0.1", "error", "error=", "error=-1", "speed=nan", "time=2", "speed=inf"])
def test_no_budget(text):
    with pytest.raises(ValueError, match="--budget"):
        Budget.parse(text)


def test_layers_that_are_named_get_the_attention():
    assert chosen_layers("2", "nystrom", 3) == ["standard", "standard", "nystrom"]
    with pytest.raises(ValueError, match="--layers '3'"):
        chosen_layers("3", "nystrom", 3)


def test_sensitivity_measures_every_layer_with_every_attention():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
    teacher = BertModel(BertConfig(**sizes, vocab_size=50, initializer_range=0.4)).eval()
    batch = {"input_ids": torch.randint(1, 50, (1, 40))}
    names = ["standard", "nystrom-4", "nystrom-30", "nystrom-64"]
    found = measure_sensitivity(teacher, [batch], names, {"exact_below": None})
    assert len(found) == 2
    for each in found:
        assert list(each) == names
        assert each["standard"].error == 0
        assert each["nystrom-4"].error > 0.01
        assert each["nystrom-64"].error < 1e-5  # as many landmarks as tokens
        assert min(candidate.seconds for candidate in each.values()) > 0


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
