"""`replace_attention`: in modules of Transformers, in PyTorch's and in those that call SDPA; whole or in part."""

import copy
import pickle

import oracles
import pytest
import torch
from encoders import SIZES, build, tokens, vit
from torch import nn
from torch.nn import functional
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
from nystromformer.attention import nystrom_attention, nystrom_local_attention

SPEECH = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
SPEECH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 50, "init_std": 0.3}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


class SelfAttention(nn.Module):
    """Attention as in most image models: one projection, a call of SDPA."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.fused = heads, True
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, attn_mask=None, is_causal=False, dropout=0.0):
        batch, length, width = x.shape
        query, key, value = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = attend(self, query, key, value, attn_mask, is_causal, dropout)
        return self.proj(out.transpose(1, 2).reshape(batch, length, width))


def attend(module, query, key, value, attn_mask, is_causal, dropout):
    if module.fused:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout
        )
    return (query @ key.mT * query.shape[3] ** -0.5).softmax(dim=-1) @ value


class CrossAttention(SelfAttention):
    def forward(self, x, context, attn_mask=None):
        query, key = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (x, context))
        return functional.scaled_dot_product_attention(query, key, key, attn_mask=attn_mask)


def by_hand(module, x, attention, **options):
    query, key, value = module.qkv(x).unflatten(2, (3, module.heads, -1)).permute(2, 0, 3, 1, 4)
    return module.proj(attention(query, key, value, **options).transpose(1, 2).flatten(2))


def torch_encoder(batch_first, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=batch_first, **options)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=batch_first).eval()


def padding(length=100, short=60):
    """True for padding, as PyTorch's modules take it."""
    return torch.arange(length) >= torch.tensor([[length], [short]])


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


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_transformer_encoders_of_pytorch(batch_first, gradients, masked):
    """Without gradients they take a fused fast path that calls none of their modules."""
    model, x = torch_encoder(batch_first), torch.randn(2, 100, 32)
    x = x if batch_first else x.transpose(0, 1)
    mask = padding() if masked else None
    real = torch.ones(2, 100, dtype=torch.bool) if mask is None else ~mask
    real = real if batch_first else real.T
    with torch.set_grad_enabled(gradients):
        before = model(x, src_key_padding_mask=mask)
        assert replace_attention(model, "nystrom-100") == ["layers.0.self_attn", "layers.1.self_attn"]
        after = model(x, src_key_padding_mask=mask)
        torch.testing.assert_close(after[real], before[real], atol=1e-5, rtol=0)
        replace_attention(model, "nystrom-8")
        coarse = model(x, src_key_padding_mask=mask)
        assert (coarse - before)[real].abs().max() > 1e-3
        restore_attention(model)
        assert torch.equal(model(x, src_key_padding_mask=mask), before)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("attention", [nystrom_attention, nystrom_local_attention])
def test_multihead_attention_is_ours_between_its_projections(batch_first, attention):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, batch_first=batch_first).double()
    x, pad = torch.randn(2, 100, 32, dtype=torch.float64, requires_grad=True), padding()
    options = {"num_landmarks": 8} | ({"block_size": 4} if attention is nystrom_local_attention else {})
    query, key, value = (
        functional.linear(x, w, b).unflatten(2, (4, 8)).transpose(1, 2)
        for w, b in zip(module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3), strict=True)
    )
    expected = module.out_proj(attention(query, key, value, ~pad, **options).transpose(1, 2).flatten(2))
    expected.square().sum().backward()
    gradient, x.grad = x.grad, None
    replace_attention(module, "nystrom-local" if attention is nystrom_local_attention else "nystrom", **options)
    given = x if batch_first else x.transpose(0, 1)
    for need_weights in (False, True):
        out, weights = module(given, given, given, key_padding_mask=pad, need_weights=need_weights)
        out = out if batch_first else out.transpose(0, 1)
        torch.testing.assert_close(out, expected)
        out.square().sum().backward()
        torch.testing.assert_close(x.grad, gradient)
        x.grad = None
    assert weights.shape == (2, 100, 100)
    assert weights[1, :, 60:].abs().max() == 0
    torch.testing.assert_close(weights[0].sum(dim=1), torch.ones(100, dtype=torch.float64), atol=0.05, rtol=0)


def test_the_dense_formula_comes_out():
    torch.manual_seed(0)
    module, x = SelfAttention().double(), torch.randn(1, 64, 32, dtype=torch.float64)
    replace_attention(module, "nystrom-8", pinv_iterations=5)
    expected = by_hand(module, x, lambda q, k, v: oracles.nystrom(q, k, v, 8, iterations=5))
    torch.testing.assert_close(module(x), expected)


def test_multihead_attention_without_a_batch_and_with_separate_projections():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, kdim=16, vdim=24, bias=False)
    query, key, value = torch.randn(50, 32), torch.randn(70, 16), torch.randn(70, 24)
    before, weights = module(query, key, value, average_attn_weights=False)
    replace_attention(module, "nystrom-70")
    after, again = module(query, key, value, average_attn_weights=False)
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(again, weights)


def test_cross_attention_masks_only_the_keys():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, batch_first=True)
    query, key = torch.randn(2, 2, 100, 32)
    before, _ = module(query, key, key, key_padding_mask=padding(), need_weights=False)
    replace_attention(module, "nystrom-100")
    after, _ = module(query, key, key, key_padding_mask=padding(), need_weights=False)
    torch.testing.assert_close(after, before)
    replace_attention(module, "nystrom-local")
    with pytest.raises(ValueError, match=r"the module \(MultiheadAttention\): nystrom-local is for self-attention"):
        module(query, key, key)


@pytest.mark.parametrize(
    "given, told",
    [
        ({"attn_mask": torch.zeros(9, 9)}, "attn_mask was given"),
        ({"attn_mask": torch.zeros(9, 9), "is_causal": True}, "is_causal=True was given"),
        ({"key_padding_mask": torch.full((1, 9), -0.5)}, "a bias on the logits"),
    ],
)
def test_multihead_attention_refuses_by_name_what_it_cant_honor(given, told):
    model = nn.ModuleDict({"mix": nn.MultiheadAttention(32, 4, batch_first=True)})
    replace_attention(model, "nystrom")
    x = torch.randn(1, 9, 32)
    with pytest.raises(ValueError, match=rf"mix \(MultiheadAttention\): .*{told}"):
        model["mix"](x, x, x, **given)


@pytest.mark.parametrize("options", [{"add_zero_attn": True}, {"add_bias_kv": True}, {"dropout": 0.1}])
def test_multihead_attention_with_more_than_attention_is_refused(options):
    module, x = nn.MultiheadAttention(32, 4, **options), torch.randn(9, 1, 32)
    replace_attention(module, "nystrom")
    with pytest.raises(ValueError, match="attention of linear cost can't honor"):
        module(x, x, x)


def test_dropout_is_refused_in_training_only():
    module, x = nn.MultiheadAttention(32, 4, dropout=0.1), torch.randn(9, 1, 32)
    replace_attention(module, "nystrom")
    module.eval()(x, x, x)
    model = build("bert").train()
    replace_attention(model, "nystrom")
    with pytest.raises(ValueError, match=r"encoder.layer.0.attention.self \(BertSelfAttention\): dropout=0.1"):
        model(tokens())


def test_large_attention_matrices_are_refused():
    module, x = nn.MultiheadAttention(32, 4), torch.randn(1025, 1, 32)
    replace_attention(module, "nystrom")
    module(x, x, x, need_weights=False)
    with pytest.raises(ValueError, match="1025 tokens were asked for: at most 1024.*need_weights=False"):
        module(x, x, x)


@pytest.mark.parametrize(
    "attention, operation", [("nystrom-8", nystrom_attention), ("nystrom-local-8", nystrom_local_attention)]
)
def test_modules_that_call_sdpa_use_ours(attention, operation):
    torch.manual_seed(0)
    model, x = nn.Sequential(SelfAttention(), SelfAttention()), torch.randn(2, 100, 32)
    expected = by_hand(model[1], by_hand(model[0], x, operation, num_landmarks=8), operation, num_landmarks=8)
    expected.square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    assert replace_attention(model, attention) == ["0", "1"]
    out = model(x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_masks_of_modules_that_call_sdpa():
    torch.manual_seed(0)
    module, x, real = SelfAttention(), torch.randn(2, 100, 32), ~padding()
    expected = by_hand(module, x, nystrom_attention, num_landmarks=8, mask=real)
    replace_attention(module, "nystrom-8")
    pairs = real[:, None, None].expand(2, 1, 100, 100).clone()
    for mask in (real[:, None, None], torch.where(real, 0.0, -torch.inf)[:, None, None], pairs):
        torch.testing.assert_close(module(x, attn_mask=mask), expected)


@pytest.mark.parametrize(
    "given, told",
    [
        ({"is_causal": True}, "is_causal=True was given"),
        ({"dropout": 0.1}, "dropout_p=0.1 was given"),
        ({"attn_mask": torch.ones(9, 9).tril().bool()}, "one entry for each pair of tokens"),
        ({"attn_mask": torch.full((1, 1, 1, 9), -0.5)}, "a bias on the logits"),
    ],
)
def test_modules_that_call_sdpa_refuse_by_name(given, told):
    model, x = nn.ModuleDict({"mix": SelfAttention()}), torch.randn(1, 9, 32)
    replace_attention(model, "nystrom")
    with pytest.raises(ValueError, match=rf"mix \(SelfAttention\): .*{told}"):
        model["mix"](x, **given)


def test_a_module_that_may_attend_elsewhere_is_refused_with_a_mask_only():
    module, x, mask = CrossAttention(), torch.randn(2, 100, 32), ~padding()[:, None, None]
    replace_attention(module, "nystrom-8")
    module(x, x)
    with pytest.raises(ValueError, match=r"the module \(CrossAttention\): a padding mask with as many queries as keys"):
        module(x, x, attn_mask=mask)


def test_a_module_that_never_calls_sdpa_is_told():
    module = SelfAttention()
    replace_attention(module, "nystrom")
    module.fused = False
    with pytest.raises(
        ValueError, match=r"\(SelfAttention\) was given nystrom attention, but its forward never called"
    ):
        module(torch.randn(1, 9, 32))


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


def test_one_layer_of_an_encoder_that_makes_nested_tensors():
    model, x = torch_encoder(True), torch.randn(2, 100, 32)
    replace_attention(model.layers[1], "nystrom-8")
    with torch.no_grad(), pytest.raises(ValueError, match="was given a nested tensor"):
        model(x, src_key_padding_mask=padding())
    replace_attention(model, "nystrom-8", layers=[1])
    with torch.no_grad():
        assert model(x, src_key_padding_mask=padding()).shape == (2, 100, 32)


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
