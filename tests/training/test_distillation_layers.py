"""What each layer bears, and which attention a budget gives it."""

import pytest
import torch
from transformers import BertConfig, BertModel

from nystromformer.training.distillation_layers import (
    Budget,
    Candidate,
    choose,
    chosen_layers,
    measure_sensitivity,
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
