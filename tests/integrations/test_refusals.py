"""What `attn_implementation="nystrom"` can't do right it refuses, by name and with the way out."""

import pytest
import torch
from encoders import SIZES, TEXT, build, switch, tokens
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    FNetConfig,
    FNetModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    LongformerConfig,
    LongformerModel,
    MistralConfig,
    MistralModel,
    T5Config,
    T5EncoderModel,
    masking_utils,
)

from nystromformer import NystromformerConfig, NystromformerModel
from nystromformer.integrations.attention_interface import nystrom_attention_forward
from nystromformer.integrations.hf_masks import WindowMask, padding_mask, window_radius

GPT2 = GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=50, bos_token_id=1, eos_token_id=2)
DECODERS = {
    "gpt2": lambda: GPT2Model._from_config(GPT2, attn_implementation="nystrom"),
    "llama": lambda: LlamaModel._from_config(LlamaConfig(**TEXT), attn_implementation="nystrom"),
    "mistral": lambda: MistralModel._from_config(
        MistralConfig(**TEXT, num_key_value_heads=2, sliding_window=8), attn_implementation="nystrom"
    ),
    "bert": lambda: BertModel._from_config(BertConfig(**TEXT, is_decoder=True), attn_implementation="nystrom"),
}
WITHOUT_INTERFACE = {
    "longformer": lambda **kw: LongformerModel._from_config(LongformerConfig(**TEXT, attention_window=4), **kw),
    "nystromformer": lambda **kw: NystromformerModel._from_config(NystromformerConfig(**TEXT), **kw),
}


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_refused(name, masked):
    model, ids = DECODERS[name](), tokens()
    with pytest.raises(ValueError, match='causal.*attn_implementation="sdpa"'):
        model(ids, attention_mask=(ids > 5).long() if masked else None)


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
    with pytest.raises(ValueError, match="FNetModel never calls"):
        model(tokens())
    with pytest.raises(ValueError, match="FNetModel never calls"):
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


def test_position_biases_are_refused():
    config = T5Config(d_model=32, d_kv=8, num_heads=4, num_layers=1, d_ff=32, vocab_size=50)
    with pytest.raises(ValueError, match="passes position_bias to its attention"):
        T5EncoderModel._from_config(config, attn_implementation="nystrom")(tokens())


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "cache", "head_mask", "something_new"])
def test_what_would_change_the_logits_is_refused_by_name(name):
    module, x = build("bert").encoder.layer[0].attention.self, torch.randn(1, 4, 9, 8)
    nystrom_attention_forward(module, x, x, x, None, **{name: None})
    with pytest.raises(ValueError, match=f"passes {name} to its attention"):
        nystrom_attention_forward(module, x, x, x, None, **{name: torch.ones(4)})


def test_masks_over_pairs_are_refused():
    model, ids = switch(build("bert"), 8), tokens()
    pairs = torch.ones(100, 100).tril().bool().expand(2, 1, 100, 100)
    with pytest.raises(ValueError, match=r"shape \(2, 1, 100, 100\), one entry for each pair of tokens"):
        model(ids, attention_mask=pairs)


def test_biases_in_additive_masks_are_refused():
    module, x = build("bert").encoder.layer[0].attention.self, torch.randn(1, 4, 9, 8)
    with pytest.raises(ValueError, match="bias on the logits"):
        nystrom_attention_forward(module, x, x, x, torch.full((1, 1, 1, 9), -0.5))


def test_a_mask_of_another_length_is_refused():
    module, x = build("bert").encoder.layer[0].attention.self, torch.randn(2, 4, 9, 8)
    with pytest.raises(ValueError, match=r"shape \(2, 8\): must be \(2, 9\)"):
        nystrom_attention_forward(module, x, x, x, torch.ones(2, 8, dtype=torch.bool))


def test_heads_that_do_not_divide_are_refused():
    module, x = build("bert").encoder.layer[0].attention.self, torch.randn(1, 4, 9, 8)
    with pytest.raises(ValueError, match="key has 3 heads and query 4"):
        nystrom_attention_forward(module, x, x[:, :3], x[:, :3], None)


def test_a_local_layer_never_runs_without_its_window():
    model, ids = switch(build("modernbert"), 8), tokens()
    local = model.layers[1].attn
    x = torch.randn(1, 4, 20, 8)
    for given in ({"sliding_window": 9}, {}):
        with pytest.raises(ValueError, match="has a sliding window, but the mask it was given has none"):
            nystrom_attention_forward(local, x, x, x, torch.ones(1, 20, dtype=torch.bool), **given)
    with pytest.raises(ValueError, match="sliding window"):
        model(ids, attention_mask={"full_attention": None, "sliding_attention": None})


def test_long_attention_matrices_are_refused():
    module, x = build("bert").encoder.layer[0].attention.self, torch.randn(1, 4, 1025, 8)
    with pytest.raises(ValueError, match="1025 tokens: at most 1024.*nystrom_attention_weights"):
        nystrom_attention_forward(module, x, x, x, None, output_attentions=True)


def test_modules_that_may_attend_elsewhere_are_refused_with_a_mask_only():
    class Either(nn.Module):
        config, is_causal = BertConfig(**SIZES), False

        def forward(self, hidden_states, key_value_states=None):
            pass

    x, mask = torch.randn(1, 4, 9, 8), torch.ones(1, 9, dtype=torch.bool)
    nystrom_attention_forward(Either(), x, x, x, None)
    with pytest.raises(ValueError, match="Either can attend to itself or to something else"):
        nystrom_attention_forward(Either(), x, x, x, mask)


def test_windows_are_read_from_the_mask_functions_of_transformers():
    assert window_radius(masking_utils.bidirectional_mask_function) is None
    assert window_radius(masking_utils.sliding_window_bidirectional_mask_function(64)) == 64
    tail = (masking_utils.bidirectional_mask_function,) * 2
    for other in (
        masking_utils.causal_mask_function,
        masking_utils.sliding_window_causal_mask_function(64),
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
    ):
        with pytest.raises(ValueError, match="causal mask was asked for"):
            window_radius(other)
    for other in (masking_utils.or_masks(*tail), masking_utils.and_masks(*tail), lambda b, h, q, k: q >= k):
        with pytest.raises(ValueError, match="must be full bidirectional attention or a bidirectional sliding window"):
            window_radius(other)


def test_continuing_from_a_cache_is_refused():
    with pytest.raises(ValueError, match="past_key_values hold earlier tokens"):
        padding_mask(mask_function=masking_utils.bidirectional_mask_function, kv_length=9, q_offset=8)


def test_a_window_travels_with_its_mask():
    mask = WindowMask(3, torch.ones(1, 4, dtype=torch.bool))
    moved = mask.to("cpu", non_blocking=True)
    assert moved.radius == 3
    assert moved.tokens.equal(mask.tokens)
    assert WindowMask(3, None).to("cpu") == WindowMask(3, None)
