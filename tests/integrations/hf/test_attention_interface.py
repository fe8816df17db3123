"""`attn_implementation="nystrom"` in encoders of Transformers: exact where it can be, right about masks, never n×n.

What it can't do right it refuses, by name and with the way out.
"""

import pytest
import torch
from encoders import ENCODERS, SIZES, TEXT, build, switch, tokens, vit
from largest_tensor import Largest
from torch import nn
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    T5Config,
    T5EncoderModel,
)

import nystromformer
from nystromformer.attention import nystrom_local_attention
from nystromformer.integrations.hf import attention_interface
from nystromformer.integrations.hf.attention_interface import FUNCTIONS
from nystromformer.integrations.offered import EXACT_BELOW, OPTIONS
from nystromformer.integrations.probe import record_calls

nystrom_attention_forward = FUNCTIONS["nystrom"]

NAMES = list(ENCODERS)
SENTENCES = [
    "The landmarks of a city are what its visitors remember.",
    "Short.",
    "A much longer sentence, which goes on about the weather of last year in several subordinate clauses, so that the "
    "batch is padded by a lot; and then it goes on a little longer, for good measure.",
]


GPT2 = GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=50, bos_token_id=1, eos_token_id=2)
DECODERS = {
    "gpt2": lambda: GPT2Model._from_config(GPT2, attn_implementation="nystrom"),
    "llama": lambda: LlamaModel._from_config(LlamaConfig(**TEXT), attn_implementation="nystrom"),
    "mistral": lambda: MistralModel._from_config(
        MistralConfig(**TEXT, num_key_value_heads=2, sliding_window=8), attn_implementation="nystrom"
    ),
    "bert": lambda: BertModel._from_config(BertConfig(**TEXT, is_decoder=True), attn_implementation="nystrom"),
}


def padded(side, short=60, length=100):
    """A mask for two sequences, the second of `short` tokens with padding on one side."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, short:] = 0
    return mask if side == "right" else mask.flip(1)


def states(model, ids, mask=None, **others):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, **others).last_hidden_state


@pytest.mark.parametrize("implementation, landmarks", [("nystrom", 100), ("nystrom-local", 134)])
@pytest.mark.parametrize("side", ["left", "right", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_with_as_many_landmarks_as_tokens_a_model_does_what_it_did(name, side, implementation, landmarks):
    """A quarter of the landmarks of nystrom-local are single keys, so that it takes 134 of them for 100 tokens."""
    model, ids = build(name), tokens()
    mask = None if side == "none" else padded(side)
    before = states(model, ids, mask)
    after = states(switch(model, landmarks, implementation), ids, mask)
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(after[real], before[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", FUNCTIONS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_a_padded_batch_gives_what_its_sequences_give_alone(name, side, implementation):
    model, ids, mask = switch(build(name), 8, implementation), tokens(), padded(side)
    places = torch.arange(100) + 2  # the same in the batch and alone, so that only the padding differs
    if name == "distilbert":  # which counts places itself
        model.embeddings.position_embeddings.weight.data.zero_()
    together = states(model, ids, mask, **({} if name == "distilbert" else {"position_ids": places.expand(2, 100)}))
    for example in range(2):
        real = mask[example].bool()
        given = {} if name == "distilbert" else {"position_ids": places[None, real]}
        alone = states(model, ids[example : example + 1, real], **given)[0]
        torch.testing.assert_close(together[example, real], alone, atol=2e-5, rtol=0)


def test_few_landmarks_change_the_output_and_more_bring_it_back():
    model, ids = build("bert"), tokens()
    exact = states(model, ids)
    errors = [(states(switch(model, m), ids) - exact).norm().item() for m in (4, 32, 64)]
    assert errors[0] > errors[1] > errors[2] > 0


def test_vit_with_enough_landmarks_is_unchanged():
    model, pixels = vit(), torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        before = model(pixels).last_hidden_state
        after = switch(model, num_landmarks=145)(pixels).last_hidden_state
        coarse = switch(model, num_landmarks=8)(pixels).last_hidden_state
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)
    assert (coarse - before).abs().max() > 1e-3


def embed(model, tokenizer, sentences):
    """Mean pooling over real tokens and normalization, as sentence-transformers does for this model."""
    batch = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def test_real_minilm_embeds_sentences_as_before(minilm):
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    exact = embed(AutoModel.from_pretrained(minilm), tokenizer, SENTENCES)
    model = AutoModel.from_pretrained(minilm, attn_implementation="nystrom")
    model.config.num_landmarks = 256
    torch.testing.assert_close(embed(model, tokenizer, SENTENCES), exact, atol=1e-5, rtol=0)
    model.config.num_landmarks = 16
    coarse = embed(model, tokenizer, SENTENCES)
    torch.testing.assert_close(coarse[1], exact[1], atol=1e-5, rtol=0)  # three tokens: exact with 16 landmarks too
    assert functional.cosine_similarity(coarse[2], exact[2], dim=0) > 0.8
    for index, sentence in enumerate(SENTENCES):
        torch.testing.assert_close(embed(model, tokenizer, [sentence])[0], coarse[index], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_half_precision_stays_near(name, dtype):
    ids, mask = tokens(), padded("right")
    wide = states(switch(build(name), 16), ids, mask)[mask.bool()]
    narrow = states(switch(build(name).to(dtype), 16), ids, mask)[mask.bool()]
    assert narrow.dtype == dtype
    assert (narrow.float() - wide).norm() < 0.05 * wide.norm()


def test_autocast_stays_near():
    model, ids, mask = switch(build("bert"), 16), tokens(), padded("right")
    wide = states(model, ids, mask)[mask.bool()]
    with torch.autocast("cpu", torch.bfloat16):
        narrow = states(model, ids, mask)[mask.bool()]
    assert (narrow.float() - wide).norm() < 0.05 * wide.norm()


def test_grouped_keys_and_values_are_repeated():
    model = LlamaModel(LlamaConfig(**TEXT, num_key_value_heads=2, is_causal=False)).eval()
    ids, mask = tokens(), padded("left")
    model.set_attn_implementation("eager")
    before = states(model, ids, mask)
    torch.testing.assert_close(
        states(switch(model, 100), ids, mask)[mask.bool()], before[mask.bool()], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_output_attentions_gives_the_matrices_that_were_used(name):
    model, ids, mask = switch(build(name), 8), tokens(), padded("right")
    with torch.no_grad():
        maps = model(ids, attention_mask=mask, output_attentions=True).attentions
    assert [tuple(x.shape) for x in maps] == [(2, 4, 100, 100)] * 2
    for weights in maps:
        assert weights[1, :, 60:].abs().max() == 0  # masked queries
        assert weights[1, :, :, 60:].abs().max() == 0  # masked keys
    if name == "modernbert":
        distance = (torch.arange(100)[:, None] - torch.arange(100)).abs()
        assert maps[1][:, :, distance > 8].abs().max() == 0
        assert maps[1][0, :, distance == 8].abs().min() > 0


def test_attention_matrices_are_those_of_nystrom_attention_weights():
    module = build("bert").encoder.layer[0].attention.self
    module.config.num_landmarks = 8
    query, key, value = torch.randn(3, 2, 4, 50, 8)
    mask = torch.arange(50) < torch.tensor([[50], [30]])
    out, weights = nystrom_attention_forward(module, query, key, value, mask, scaling=0.3, output_attentions=True)
    expected = nystromformer.nystrom_attention_weights(query, key, range(50), mask, num_landmarks=8, scale=0.3)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, (weights @ value).transpose(1, 2))
    assert out.is_contiguous()


def test_masks_of_models_that_make_their_own_are_understood():
    module = build("bert").encoder.layer[0].attention.self
    query, key, value = torch.randn(3, 2, 4, 100, 8)
    mask = padded("right").bool()
    expected, _ = nystrom_attention_forward(module, query, key, value, mask)
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)[:, None, None]
    for other in (mask[:, None, None], additive, additive.expand(2, 1, 100, 100), mask.long()):
        torch.testing.assert_close(nystrom_attention_forward(module, query, key, value, other)[0], expected)


def test_cross_attention_masks_only_the_keys():
    config = BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    module = BertModel(config).encoder.layer[0].crossattention.self
    query, key, value = torch.randn(3, 2, 4, 100, 8)  # as many queries as keys, by chance
    mask = padded("right").bool()
    module.config.num_landmarks = 100
    out, _ = nystrom_attention_forward(module, query, key, value, mask, scaling=8**-0.5)
    expected = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
    torch.testing.assert_close(out, expected.transpose(1, 2))
    with pytest.raises(ValueError, match="nystrom-local is for self-attention"):
        FUNCTIONS["nystrom-local"](module, query, key, value, mask)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_nothing_of_n_by_n_elements_is_made(name):
    model, ids = switch(build(name), 16), tokens(batch=2, length=512)
    mask = torch.arange(512) < torch.tensor([[512], [400]])
    with Largest() as largest:
        model(ids, attention_mask=mask.long()).last_hidden_state.sum().backward()
    assert largest.elements < 512 * 512  # one matrix of one head of one example; there are 8


def test_gradients_reach_the_model_in_training():
    model, ids = switch(build("bert"), 8).train(), tokens()
    attention_interface.warn_about_dropout.cache_clear()
    with pytest.warns(UserWarning, match="dropout on attention probabilities"):
        model(ids).last_hidden_state.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in model.named_parameters() if "pooler" not in n)


def test_gradient_checkpointing_keeps_windows_and_gradients():
    ids, mask = tokens(), padded("right")
    gradients = []
    for checkpointing in (False, True):
        model = switch(build("modernbert"), 8).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, attention_mask=mask).last_hidden_state[mask.bool()].square().sum().backward()
        gradients.append(model.layers[1].attn.Wqkv.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
def test_a_compiled_model_gives_the_same():
    model, ids, mask = switch(build("bert"), 8), tokens(), padded("right")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(states(compiled, ids, mask), states(model, ids, mask))


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_are_refused(name, masked):
    model, ids = DECODERS[name](), tokens()
    with pytest.raises(ValueError, match='causal.*attn_implementation="sdpa"'):
        model(ids, attention_mask=(ids > 5).long() if masked else None)


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
    with pytest.raises(ValueError, match="1025 tokens were asked for: at most 1024.*nystrom_attention_weights"):
        nystrom_attention_forward(module, x, x, x, None, output_attentions=True)


def test_modules_that_may_attend_elsewhere_are_refused_with_a_mask_only():
    class Either(nn.Module):
        config, is_causal = BertConfig(**SIZES), False

        def forward(self, hidden_states, key_value_states=None):
            pass

    x, mask = torch.randn(1, 4, 9, 8), torch.ones(1, 9, dtype=torch.bool)
    nystrom_attention_forward(Either(), x, x, x, None)
    with pytest.raises(ValueError, match="Either: can attend to itself or to something else"):
        nystrom_attention_forward(Either(), x, x, x, mask)


def test_all_options_come_from_the_configuration():
    model, ids = build("bert"), tokens()
    calls, _ = record_calls(model, input_ids=ids)
    module = model.encoder.layer[0].attention.self
    options = {"num_landmarks": 12, "heavy_keys": 5, "block_size": 4, "core_rows": 20, "ridge": 0.1}
    module.config.attention_options = options
    out, _ = FUNCTIONS["nystrom-local"](module, calls[0].query, calls[0].key, calls[0].value, None, is_causal=False)
    expected = nystrom_local_attention(calls[0].query, calls[0].key, calls[0].value, **options)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    module.config.attention_options = {}
    module.config.num_landmarks = 12
    out, _ = FUNCTIONS["nystrom-local"](module, calls[0].query, calls[0].key, calls[0].value, None, is_causal=False)
    assert (out - expected.transpose(1, 2)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "options, told",
    [
        ({"num_landmark": 8}, "option 'num_landmark' of 'nystrom': must be one of .* Did you mean 'num_landmarks'?"),
        ({"num_landmarks": 0}, "num_landmarks=0: must be at least 1"),
        ({"pinv": "exakt"}, "pinv='exakt': must be one of .* Did you mean 'exact'?"),
        ({"heavy_keys": 3}, "option 'heavy_keys' of 'nystrom'"),
        ({"conv_kernel_size": 3}, "add_skip_convolution"),
    ],
)
def test_bad_options_are_refused_when_a_model_is_built_and_when_it_is_switched(options, told):
    config = BertConfig(**TEXT, attention_options=options)
    with pytest.raises(ValueError, match=told):
        BertModel._from_config(config, attn_implementation="nystrom")
    model = BertModel(BertConfig(**TEXT))
    model.config.attention_options = options
    with pytest.raises(ValueError, match=told):
        model.set_attn_implementation("nystrom")
    assert model.config._attn_implementation == "sdpa"


def test_options_that_are_no_dict_or_contradict_each_other_are_refused():
    with pytest.raises(TypeError, match=r"config.attention_options=\[8\]: must be a dict"):
        BertModel._from_config(BertConfig(**TEXT, attention_options=[8]), attn_implementation="nystrom")
    config = BertConfig(**TEXT, attention_options={"num_landmarks": 8}, num_landmarks=9)
    with pytest.raises(ValueError, match="num_landmarks=8, but config.num_landmarks is 9"):
        BertModel._from_config(config, attn_implementation="nystrom")


def test_gradients_of_the_output_reach_the_attention_matrices():
    model, ids = switch(build("bert"), 8), tokens()
    model(ids)
    out = model(ids, output_attentions=True)
    for weights in out.attentions:
        weights.retain_grad()
    out.last_hidden_state.square().sum().backward()
    assert all(weights.grad.abs().max() > 0 for weights in out.attentions)
    torch.testing.assert_close(out.last_hidden_state, model(ids).last_hidden_state, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", list(OPTIONS))
def test_short_texts_are_exact_by_default(name, monkeypatch):
    """Each by its own length, whatever batch it comes in; longer ones are approximated."""
    monkeypatch.setitem(OPTIONS[name], "exact_below", EXACT_BELOW)
    model = build("bert")
    ids, mask = tokens(3, 400), torch.arange(400) < torch.tensor([[400], [256], [30]])
    exact = model(ids, attention_mask=mask.long()).last_hidden_state
    ours = switch(model, 8, name)(ids, attention_mask=mask.long()).last_hidden_state
    for i, length in enumerate(mask.sum(1).tolist()):
        assert torch.allclose(ours[i, :length], exact[i, :length], atol=1e-5) is (length <= 256)
    model.config.attention_options = {"exact_below": None}
    off = model(ids, attention_mask=mask.long()).last_hidden_state
    assert not torch.allclose(off[1, :256], exact[1, :256], atol=1e-5)
