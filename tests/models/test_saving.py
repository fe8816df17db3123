"""Saving and loading: safetensors, tied weights, and checkpoints that do not fit."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nystromformer import (
    NystromformerForMaskedLM,
    NystromformerForPreTraining,
    NystromformerForSequenceClassification,
    NystromformerModel,
)
from nystromformer.attention import ATTENTIONS


@pytest.mark.parametrize("attention", list(ATTENTIONS))
def test_a_model_loads_as_it_was_saved(attention, small, lively, ids, tmp_path):
    model = lively(NystromformerForMaskedLM(small(attention=attention)))
    model.save_pretrained(tmp_path)
    loaded = NystromformerForMaskedLM.from_pretrained(tmp_path)
    x = ids(2, 40)
    outs = []
    for each in (model, loaded):
        torch.manual_seed(0)
        outs.append(each(x).logits)
    assert torch.equal(*outs)
    head, words = loaded.cls.predictions, loaded.get_input_embeddings()
    assert head.decoder.weight is words.weight
    assert head.decoder.bias is head.bias


def test_untied_words_stay_apart(small, lively, tmp_path):
    model = lively(NystromformerForMaskedLM(small(tie_word_embeddings=False)))
    model.save_pretrained(tmp_path)
    loaded = NystromformerForMaskedLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.cls.predictions.decoder.weight, model.cls.predictions.decoder.weight)
    assert not torch.equal(loaded.cls.predictions.decoder.weight, loaded.get_input_embeddings().weight)


def test_heads_change_and_the_encoder_stays(small, lively, tmp_path):
    model = lively(NystromformerForPreTraining(small(add_pooler=True)))
    model.save_pretrained(tmp_path)
    for head in (NystromformerForMaskedLM, NystromformerForSequenceClassification, NystromformerModel):
        loaded = head.from_pretrained(tmp_path)
        for name, parameter in loaded.base_model.encoder.named_parameters():
            assert torch.equal(parameter, model.nystromformer.encoder.get_parameter(name))
    assert torch.equal(loaded.pooler.dense.weight, model.nystromformer.pooler.dense.weight)


def test_another_attention_takes_over_the_projections(small, lively, tmp_path):
    model = lively(NystromformerModel(small()))
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    for attention in ("standard", "linformer-16", "performer-32"):
        loaded = NystromformerModel.from_pretrained(tmp_path, attention=attention)
        query = loaded.encoder.layer[1].attention.self.query.weight
        assert torch.equal(query, model.encoder.layer[1].attention.self.query.weight)
        new = [p for name, p in loaded.state_dict().items() if ".self.attention." in name]
        assert all(p.isfinite().all() and 1e-3 < p.std() < 10 for p in new), "new weights must be initialized"


def test_missing_weights_are_named_with_what_to_do(small, tmp_path):
    NystromformerModel(small()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"], weights["embeddings.LayerNorm.bias"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"missing weights: embeddings.LayerNorm.bias, encoder.layer.1.output.dense.weight\. Check.*strict=False",
    ):
        NystromformerModel.from_pretrained(tmp_path)
    NystromformerModel.from_pretrained(tmp_path, strict=False)


def test_surplus_weights_are_named_with_what_to_do(small, tmp_path):
    NystromformerForMaskedLM(small()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"surplus weights: nystromformer.encoder.layer.1.attention.*and \d+ more"):
        NystromformerForMaskedLM.from_pretrained(tmp_path)
    model, info = NystromformerForMaskedLM.from_pretrained(tmp_path, strict=False, output_loading_info=True)
    assert len(model.nystromformer.encoder.layer) == 1
    assert info["unexpected_keys"]


def test_weights_of_other_shapes_are_named(small, tmp_path):
    NystromformerForSequenceClassification(small(num_labels=3)).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"classifier.out_proj.bias \(3,\), needed \(5,\).*ignore_mismatched_sizes=True"
    ):
        NystromformerForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    model = NystromformerForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert model.classifier.out_proj.out_features == 5


def test_pickles_are_refused_in_favour_of_safetensors(small, tmp_path):
    model = NystromformerModel(small())
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no model.safetensors: give a folder"):
        NystromformerModel.from_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"has pytorch_model.bin but no model.safetensors.*can run code.*save_pretrained"
    ):
        NystromformerModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="use_safetensors=False: must be True"):
        NystromformerModel.from_pretrained(tmp_path, use_safetensors=False)


def test_a_bert_checkpoint_is_refused_with_the_command_to_convert_it(tmp_path):
    config = transformers.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="nystromformer convert SRC DST"):
        NystromformerModel.from_pretrained(tmp_path)


def test_positions_are_tiled_or_cut(small, lively, ids):
    model = lively(NystromformerModel(small()))
    before, x = model.get_position_embeddings().weight.clone(), ids(1, 100)
    short = model(x).last_hidden_state
    model.resize_position_embeddings(300)
    after = model.get_position_embeddings().weight
    assert torch.equal(after, torch.cat((before, before[2:], before[2:46])))
    assert torch.equal(model(x).last_hidden_state, short)
    assert model(ids(1, 300)).last_hidden_state.shape == (1, 300, 32)
    model.resize_position_embeddings(50)
    assert torch.equal(model.get_position_embeddings().weight, before[:52])
    with pytest.raises(ValueError, match="must be at least 1"):
        model.resize_position_embeddings(0)
    with pytest.raises(ValueError, match="LinformerAttention has parameters for each position"):
        NystromformerModel(small(attention="linformer")).resize_position_embeddings(300)


def test_a_deep_copy_is_independent(small, lively, ids):
    import copy

    model, x = lively(NystromformerModel(small())), ids(1, 30)
    expected, other = model(x).last_hidden_state, copy.deepcopy(model)
    other.encoder.layer[0].attention.self.conv.weight.data.zero_()
    assert not torch.equal(other(x).last_hidden_state, expected)
    assert torch.equal(model(x).last_hidden_state, expected)


def test_other_shapes_are_the_error_that_transformers_promises(small, tmp_path):
    NystromformerForSequenceClassification(small(num_labels=2)).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="has weights of other shapes: classifier.out_proj"):
        NystromformerForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
