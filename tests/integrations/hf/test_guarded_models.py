"""Models that would accept our names and not use them are refused; what a model was is remembered when it is saved."""

import subprocess
import sys

import pytest
import torch
from encoders import SIZES, TEXT, build, tokens
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    FNetConfig,
    FNetModel,
    LongformerConfig,
    LongformerModel,
)

from nystromformer import NystromformerConfig, NystromformerModel

WITHOUT_INTERFACE = {
    "longformer": lambda **kw: LongformerModel._from_config(LongformerConfig(**TEXT, attention_window=4), **kw),
    "nystromformer": lambda **kw: NystromformerModel._from_config(NystromformerConfig(**TEXT), **kw),
}


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_models_with_attention_of_their_own_are_refused_when_loaded(name):
    with pytest.raises(ValueError, match="Model never calls Transformers' attention interface"):
        WITHOUT_INTERFACE[name](attn_implementation="nystrom")
    model = WITHOUT_INTERFACE[name]()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="never calls"):
        model.set_attn_implementation("nystrom")
    assert model.config._attn_implementation == before


def test_models_without_attention_are_refused():
    model = FNetModel._from_config(FNetConfig(**TEXT, tpu_short_seq_length=100), attn_implementation="nystrom")
    none = "FNetModel has no attention to replace: it mixes tokens in another way"
    with pytest.raises(ValueError, match=none):
        model(tokens())
    with pytest.raises(ValueError, match=none):
        FNetModel(FNetConfig(**TEXT)).set_attn_implementation("nystrom")


def test_a_part_without_attention_does_not_stop_a_model_with_some():
    class Both(BertModel):
        def __init__(self, config):
            super().__init__(config)
            self.mixer = FNetModel._from_config(FNetConfig(**TEXT), attn_implementation="nystrom")

        def forward(self, input_ids):
            return super().forward(inputs_embeds=self.mixer(input_ids).last_hidden_state)

    Both._from_config(BertConfig(**TEXT), attn_implementation="nystrom")(tokens())


def test_a_part_with_attention_of_its_own_is_named():
    class Partly(BertModel):
        def __init__(self, config):
            super().__init__(config)
            self.pool = nn.MultiheadAttention(32, 4)
            self.post_init()

    with pytest.warns(UserWarning, match="MultiheadAttention: .*own attention, which is exact"):
        Partly._from_config(BertConfig(**TEXT), attn_implementation="nystrom")


def test_a_saved_model_comes_back_with_its_attention_and_options(tmp_path):
    model, ids = build("bert"), tokens()
    model.config.attention_options = {"num_landmarks": 8, "block_size": 4}
    model.set_attn_implementation("nystrom-local")
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "nystrom-local"
    assert again.config.attention_options == {"num_landmarks": 8, "block_size": 4}
    assert torch.equal(again(ids).last_hidden_state, model(ids).last_hidden_state)
    exact = AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert exact.config._attn_implementation == "sdpa"
    assert (exact(ids).last_hidden_state - model(ids).last_hidden_state).abs().max() > 1e-3
    again.set_attn_implementation("sdpa")
    again.save_pretrained(tmp_path / "exact")
    assert AutoModel.from_pretrained(tmp_path / "exact").config._attn_implementation == "sdpa"


def test_a_part_that_has_another_attention_comes_back_with_it(tmp_path):
    text = SIZES | {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = CLIPConfig(text_config=text, vision_config=SIZES | {"image_size": 32, "patch_size": 8}, projection_dim=8)
    model = CLIPModel._from_config(config, attn_implementation={"vision_config": "nystrom"})
    model.save_pretrained(tmp_path)
    again = CLIPModel.from_pretrained(tmp_path)
    assert again.config.vision_config._attn_implementation == "nystrom"
    assert again.config.text_config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_without_register_a_saved_model_is_refused_by_name(tmp_path):
    model = build("bert")
    model.set_attn_implementation("nystrom")
    model.save_pretrained(tmp_path)
    code = "import sys; from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'Specified `attn_implementation="nystrom"` is not supported' in done.stderr
