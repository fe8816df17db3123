"""Another attention in each layer: honored, saved, loaded, and refused where it can't be."""

import pytest
import torch
from transformers import AutoModel, BertConfig, BertForSequenceClassification, BertModel

import nystromformer
from nystromformer.integrations.hf.layer_attentions import set_layers
from nystromformer.integrations.hf.modules import interface_modules

NAMES = ["standard", "nystrom-8", "nystrom-local-8"]
OPTIONS = {"exact_below": None, "block_size": 4}


@pytest.fixture
def model():
    nystromformer.register()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 16}
    config = BertConfig(**sizes, vocab_size=50, max_position_embeddings=64)
    config.initializer_range = 0.3
    return BertModel(config).eval()


@pytest.fixture
def inputs():
    ids = torch.randint(5, 50, (2, 60), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.arange(60) < torch.tensor([[60], [41]])}


def outputs(model, inputs):
    with torch.no_grad():
        return model(**inputs, output_hidden_states=True).hidden_states


def test_each_layer_has_the_attention_of_its_place(model, inputs):
    real = inputs["attention_mask"]
    exact = outputs(model, inputs)
    set_layers(model, NAMES, OPTIONS)
    mixed = outputs(model, inputs)
    torch.testing.assert_close(mixed[1][real], exact[1][real])  # the first layer stays exact
    states = {}
    for name, options in (("nystrom", {"exact_below": None}), ("nystrom-local", OPTIONS)):
        model.config.attention_layers = None
        model.config.attention_options = options | {"num_landmarks": 8}
        model.set_attn_implementation(name)
        layer = model.encoder.layer[{"nystrom": 1, "nystrom-local": 2}[name]]
        before = mixed[{"nystrom": 1, "nystrom-local": 2}[name]]
        with torch.no_grad():
            states[name] = layer(before, real)
    torch.testing.assert_close(states["nystrom"][real], mixed[2][real])
    torch.testing.assert_close(states["nystrom-local"][real], mixed[3][real])


def test_a_saved_model_comes_back_with_its_layers_and_convolutions(model, inputs, tmp_path):
    set_layers(model, NAMES, OPTIONS)
    nystromformer.add_skip_convolution(model, 3)
    convolutions = [module for module in interface_modules(model) if hasattr(module, "skip_convolution")]
    assert len(convolutions) == 2  # none where attention is exact
    for module in convolutions:
        torch.nn.init.normal_(module.skip_convolution.weight)
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path).eval()
    assert again.config.attention_layers == NAMES
    torch.testing.assert_close(outputs(again, inputs), outputs(model, inputs))
    with_head = BertForSequenceClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(outputs(with_head.bert, inputs), outputs(model, inputs))


@pytest.mark.parametrize(
    "names, options, told",
    [
        (NAMES[:2], {}, "2 attentions for 3 layers"),
        (["standard"] * 3, {}, "at least one layer"),
        ([*NAMES[:2], "linformer-8"], {}, "linformer-8"),
        ([*NAMES[:2], "nystrom-loca"], {}, "nystrom-local"),
        (["nystrom-8", *NAMES[:2]], {"block_size": 4}, "block_size"),
    ],
)
def test_what_a_model_cannot_have_is_refused(names, options, told, model):
    with pytest.raises(ValueError, match=told):
        set_layers(model, names, options)


def test_a_list_of_another_length_is_refused_when_it_is_used(model, inputs, tmp_path):
    set_layers(model, NAMES, {})
    model.config.attention_layers = NAMES[:2]
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lists 2 attentions"):
        outputs(again, inputs)
