"""`register()`: Auto classes and pipelines load our models."""

import importlib
import re

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import nystromformer
from nystromformer.errors import install_hint

WORDS = ["[PAD]", "[UNK]", "[MASK]", "the", "cat", "sat", "on", "mat", "dog"]
AUTO_CLASSES = {
    "AutoModel": "Model",
    "AutoModelForPreTraining": "ForPreTraining",
    "AutoModelForMaskedLM": "ForMaskedLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    "AutoModelForMultipleChoice": "ForMultipleChoice",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that always answers "cat", and a small tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    nystromformer.register()
    nystromformer.register()  # twice is fine
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = nystromformer.NystromformerConfig(
        vocab_size=9, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16, pad_token_id=0
    )
    torch.manual_seed(0)
    model = nystromformer.NystromformerForMaskedLM(config)
    model.cls.predictions.bias.data[WORDS.index("cat")] = 9.0
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name, head", AUTO_CLASSES.items())
def test_auto_classes_build_our_models(name, head, folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    assert type(config) is nystromformer.NystromformerConfig
    expected = getattr(nystromformer, "Nystromformer" + head)
    assert type(getattr(transformers, name).from_pretrained(folder)) is expected
    assert type(getattr(transformers, name).from_config(config)) is expected


def test_a_pipeline_fills_masks_in_short_and_long_text(folder):
    fill = transformers.pipeline("fill-mask", model=str(folder))
    assert type(fill.model) is nystromformer.NystromformerForMaskedLM
    assert fill("the [MASK] sat on the mat")[0]["sequence"] == "the cat sat on the mat"
    assert fill("the [MASK] sat on the mat" + " the dog sat" * 100)[0]["token_str"] == "cat"


def test_model_classes_come_on_demand():
    assert {"NystromformerModel", "register"} <= set(dir(nystromformer))
    with pytest.raises(AttributeError, match="no attribute 'NystromformerForDreams'"):
        _ = nystromformer.NystromformerForDreams


def test_without_transformers_the_remedy_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        ImportError, match=re.escape(f"NystromformerModel needs transformers: {install_hint('models')}")
    ):
        _ = nystromformer.NystromformerModel
