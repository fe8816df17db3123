"""`replace_attention` in whole models: which layers, what stays as it was, and what is refused."""

import copy
import pickle

import pytest
import torch
from encoders import SIZES, build, tokens, vit
from torch import nn
from torch_attentions import SelfAttention, padding, torch_encoder
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertModel,
    FNetConfig,
    FNetModel,
    PegasusConfig,
    PegasusForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from nystromformer import NystromformerConfig, NystromformerModel, replace_attention, restore_attention

SPEECH = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
SPEECH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 50, "init_std": 0.3}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def sequences_to_sequences(name):
    torch.manual_seed(0)
    if name == "whisper":
        config = WhisperConfig(**SPEECH, **SPECIAL, max_source_positions=100, max_target_positions=30, num_mel_bins=8)
        config.suppress_tokens = config.begin_suppress_tokens = None
        model, given = WhisperForConditionalGeneration(config), {"input_features": torch.randn(2, 8, 200)}
    else:
        config, kind = {
            "bart": (BartConfig, BartForConditionalGeneration),
            "pegasus": (PegasusConfig, PegasusForConditionalGeneration),
        }[name]
        model = kind(config(**SPEECH, **SPECIAL, max_position_embeddings=128, forced_eos_token_id=2))
        given = {"input_ids": tokens(), "attention_mask": (~padding()).long()}
    return model.eval(), given


def written(model, given):
    return model.generate(**given, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("name", ["whisper", "bart", "pegasus"])
def test_an_encoder_alone_is_replaced_and_the_whole_model_writes(name):
    model, given = sequences_to_sequences(name)
    encoder = model.get_encoder()
    before, states = written(model, given), encoder(**given).last_hidden_state
    names = ["layers.0.self_attn", "layers.1.self_attn"]
    assert replace_attention(encoder, "nystrom-local-200") == names
    assert torch.equal(written(model, given), before)  # as many landmarks as tokens, so nothing is approximated
    assert model.config._attn_implementation == "sdpa"  # of which the decoder holds a reference
    replace_attention(encoder, "nystrom-local-4", block_size=4, heavy_keys=1)
    coarse = encoder(**given).last_hidden_state
    assert (coarse - states).abs().max() > 1e-2
    assert written(model, given).shape[0] == 2
    assert restore_attention(model) == [f"model.encoder.{name}" for name in names]
    assert torch.equal(written(model, given), before)
    torch.testing.assert_close(encoder(**given).last_hidden_state, states)


def test_a_decoder_is_refused_by_name():
    model, _ = sequences_to_sequences("bart")
    with pytest.raises(ValueError, match=r"model.decoder.layers.0.self_attn \(BartAttention\) is causal.*get_encoder"):
        replace_attention(model, "nystrom")
    assert restore_attention(model) == []


def test_dropout_is_refused_in_training_only():
    module, x = nn.MultiheadAttention(32, 4, dropout=0.1), torch.randn(9, 1, 32)
    replace_attention(module, "nystrom")
    module.eval()(x, x, x)
    model = build("bert").train()
    replace_attention(model, "nystrom")
    with pytest.raises(ValueError, match=r"encoder.layer.0.attention.self \(BertSelfAttention\): dropout=0.1"):
        model(tokens())


def test_layers_are_chosen_by_name_number_or_function():
    model = build("bert")
    names = [f"encoder.layer.{i}.attention.self" for i in range(2)]
    for layers, expected in [
        (None, names),
        ([0], names[:1]),
        ([-1], names[1:]),
        ([names[1]], names[1:]),
        (["encoder.layer.0"], names[:1]),
        (["encoder.layer.1", 0], names),
        (lambda name, module: name.startswith("encoder.layer.1"), names[1:]),
    ]:
        assert replace_attention(model, "nystrom", layers=layers) == expected
        assert restore_attention(model) == expected
    for layers, told in [
        (["encoder.layers.0"], "Did you mean 'encoder.layer.0.attention.self'"),
        ([2], "must lie between -2 and 1"),
        ([], "chooses none of the attentions"),
        (lambda name, module: False, "chooses none of the attentions"),
    ]:
        with pytest.raises(ValueError, match=told):
            replace_attention(model, "nystrom", layers=layers)
    with pytest.raises(TypeError, match=r"layers=0: must be a list of names and numbers, as \[0\]"):
        replace_attention(model, "nystrom", layers=0)


def test_some_layers_of_a_model_of_transformers_with_padding():
    """Its masks are then made for exact attention, over pairs of tokens."""
    model, ids, mask = build("bert"), tokens(), (~padding()).long()
    before = model(ids, attention_mask=mask).last_hidden_state
    replace_attention(model, "nystrom-100", layers=[1])
    after = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()], atol=1e-5, rtol=0)
    replace_attention(model, "nystrom-100")
    assert model.config._attn_implementation == "nystrom"  # and masks have one flag for each token
    restore_attention(model.encoder.layer[0])
    assert model.config._attn_implementation == "sdpa"
    after = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()], atol=1e-5, rtol=0)


def test_windows_of_layers_are_kept():
    model, ids, mask = build("modernbert"), tokens(), (~padding()).long()
    before = model(ids, attention_mask=mask).last_hidden_state
    replace_attention(model, "nystrom-100")
    after = model(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()], atol=1e-5, rtol=0)
    replace_attention(model, "nystrom", layers=[1])
    restore_attention(model.layers[0])
    with pytest.raises(ValueError, match=r"layers.1.attn \(ModernBertAttention\): .*pair of tokens"):
        model(ids, attention_mask=mask)


def test_an_image_model():
    model, pixels = vit(), torch.randn(2, 3, 48, 48)
    before = model(pixels).last_hidden_state
    assert len(replace_attention(model, "nystrom-145")) == 2
    torch.testing.assert_close(model(pixels).last_hidden_state, before, atol=1e-5, rtol=0)


def test_state_and_saved_files_stay_what_they_were(tmp_path):
    model, ids = build("bert"), tokens()
    keys, before = list(model.state_dict()), model(ids).last_hidden_state
    model.save_pretrained(tmp_path / "before")
    replace_attention(model, "nystrom-8")
    coarse = model(ids).last_hidden_state
    assert list(model.state_dict()) == keys
    model.save_pretrained(tmp_path / "after")
    assert (tmp_path / "after/config.json").read_text() == (tmp_path / "before/config.json").read_text()
    again = BertModel.from_pretrained(tmp_path / "after")
    assert torch.equal(again(ids).last_hidden_state, before)
    replace_attention(again, "nystrom-8")
    assert torch.equal(again(ids).last_hidden_state, coarse)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])  # noqa: S301
@pytest.mark.parametrize("name", ["bert", "torch", "sdpa"])
def test_copies_are_models_of_their_own(name, copied):
    torch.manual_seed(0)
    x = tokens() if name == "bert" else torch.randn(2, 100, 32)
    make = {"bert": lambda: build("bert"), "torch": lambda: torch_encoder(True), "sdpa": SelfAttention}
    model = make[name]()
    run = lambda model: model(x).last_hidden_state if name == "bert" else model(x)
    before = run(model)
    replace_attention(model, "nystrom-8")
    coarse, other = run(model), copied(model)
    assert torch.equal(run(other), coarse)
    restore_attention(model)
    assert torch.equal(run(model), before)
    assert torch.equal(run(other), coarse)
    restore_attention(other)
    assert torch.equal(run(other), before)


def test_replaced_again_the_new_attention_counts():
    model, x = torch_encoder(True), torch.randn(1, 100, 32)
    before = model(x)
    replace_attention(model, "nystrom-8")
    replace_attention(model, "nystrom-local-200")
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=0)
    restore_attention(model)
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    assert torch.equal(model(x), before)


OTHERWISE = " Nothing in it is called attention: it may mix tokens in another way."


@pytest.mark.parametrize(
    "module, other",
    [
        (nn.Linear(2, 2), OTHERWISE),
        (nn.LSTM(2, 2), OTHERWISE),
        (FNetModel(FNetConfig(hidden_size=16, num_hidden_layers=1, vocab_size=50)), OTHERWISE),
        (NystromformerModel(NystromformerConfig(**SIZES)), ""),
    ],
    ids=["linear", "lstm", "fnet", "own"],
)
def test_nothing_to_replace_is_an_error_that_says_what_was_looked_for(module, other):
    told = f"has no attention to replace.{other} Looked for.*MultiheadAttention.*config.attention"
    with pytest.raises(ValueError, match=told):
        replace_attention(module, "nystrom")


@pytest.mark.parametrize(
    "attention, options, told",
    [
        ("nystrm", {}, "Did you mean 'nystrom'"),
        ("linformer-64", {}, "can't be put into a model that was made without it"),
        ("nystrom", {"num_landmark": 9}, "Did you mean 'num_landmarks'"),
        ("nystrom-8", {"num_landmarks": 9}, "already sets num_landmarks"),
        ("nystrom-local", {"ridge": -1.0}, "ridge=-1.0"),
        ("nystrom", {"conv_kernel_size": 33}, "add_skip_convolution"),
    ],
)
def test_bad_names_and_options_change_nothing(attention, options, told):
    model = torch_encoder(True)
    with pytest.raises(ValueError, match=told):
        replace_attention(model, attention, **options)
    assert restore_attention(model) == []


def test_a_replaced_model_compiles():
    torch.manual_seed(0)
    model, x = nn.Sequential(SelfAttention(), SelfAttention()), torch.randn(1, 100, 32)
    replace_attention(model, "nystrom-8")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
