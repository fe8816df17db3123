"""`replace_attention` in PyTorch's own modules and in those that call SDPA: ours in their place, or refused by name."""

import oracles
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch_attentions import CrossAttention, SelfAttention, by_hand, padding, torch_encoder

from nystromformer import replace_attention, restore_attention
from nystromformer.attention import nystrom_attention, nystrom_local_attention


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


def test_large_attention_matrices_are_refused():
    module, x = nn.MultiheadAttention(32, 4), torch.randn(1025, 1, 32)
    replace_attention(module, "nystrom")
    module(x, x, x, need_weights=False)
    with pytest.raises(ValueError, match="1025 tokens were asked for: at most 1024.*need_weights=False"):
        module(x, x, x)


def test_one_layer_of_an_encoder_that_makes_nested_tensors():
    model, x = torch_encoder(True), torch.randn(2, 100, 32)
    replace_attention(model.layers[1], "nystrom-8")
    with torch.no_grad(), pytest.raises(ValueError, match="was given a nested tensor"):
        model(x, src_key_padding_mask=padding())
    replace_attention(model, "nystrom-8", layers=[1])
    with torch.no_grad():
        assert model(x, src_key_padding_mask=padding()).shape == (2, 100, 32)


def test_the_dense_formula_comes_out():
    torch.manual_seed(0)
    module, x = SelfAttention().double(), torch.randn(1, 64, 32, dtype=torch.float64)
    replace_attention(module, "nystrom-8", pinv_iterations=5)
    expected = by_hand(module, x, lambda q, k, v: oracles.nystrom(q, k, v, 8, iterations=5))
    torch.testing.assert_close(module(x), expected)


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
