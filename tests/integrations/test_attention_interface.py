"""`attn_implementation="nystrom"` in encoders of Transformers: exact where it can be, right about masks, never n×n."""

import pytest
import torch
from encoders import ENCODERS, TEXT, build, switch, tokens, vit
from largest_tensor import Largest
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, LlamaConfig, LlamaModel

import nystromformer
from nystromformer.integrations import attention_interface
from nystromformer.integrations.attention_interface import FUNCTIONS, nystrom_attention_forward

NAMES = list(ENCODERS)
SENTENCES = [
    "The landmarks of a city are what its visitors remember.",
    "Short.",
    "A much longer sentence, which goes on about the weather of last year in several subordinate clauses, so that the "
    "batch is padded by a lot; and then it goes on a little longer, for good measure.",
]


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
    """Mean pooling over real tokens and normalisation, as sentence-transformers does for this model."""
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
    expected = nystromformer.nystrom_attention_weights(
        query, key, range(50), num_landmarks=8, query_mask=mask, key_mask=mask, scale=0.3
    )
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
    with pytest.raises(ValueError, match="BertCrossAttention is cross-attention: nystrom-local is for self-attention"):
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


def test_a_compiled_model_gives_the_same():
    model, ids, mask = switch(build("bert"), 8), tokens(), padded("right")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(states(compiled, ids, mask), states(model, ids, mask))
