"""`use_attention`: SDPA calls inside a `with` block are ours, and nothing that they ask for is ignored."""

import pytest
import torch
from encoders import build, tokens
from torch import nn
from torch.nn import functional

import nystromformer
from nystromformer import use_attention
from nystromformer.attention import nystrom_attention, nystrom_local_attention

sdpa = functional.scaled_dot_product_attention


def heads(*shape):
    return torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))


def test_calls_inside_are_ours_and_those_outside_exact():
    query, key, value = heads(2, 4, 100, 8)
    exact = sdpa(query, key, value, scale=0.2)
    with use_attention("nystrom-local-8", block_size=4):
        ours = sdpa(query, key, value, scale=0.2)
    expected = nystrom_local_attention(query, key, value, num_landmarks=8, block_size=4, scale=0.2)
    assert torch.equal(ours, expected)
    assert torch.equal(sdpa(query, key, value, scale=0.2), exact)


def test_an_inner_block_goes_before_an_outer_one():
    query, key, value = heads(1, 2, 100, 8)
    with use_attention("nystrom-8"):
        with use_attention("nystrom-16"):
            inner = sdpa(query, key, value)
        outer = sdpa(query, key, value)
    assert torch.equal(inner, nystrom_attention(query, key, value, num_landmarks=16))
    assert torch.equal(outer, nystrom_attention(query, key, value, num_landmarks=8))


def test_our_own_attentions_inside_stay_what_they_are():
    """They call SDPA for their parts."""
    layer, x = nystromformer.NystromAttention(32, num_heads=4, num_landmarks=8), torch.randn(1, 100, 32)
    model, ids = build("bert"), tokens()
    nystromformer.replace_attention(model, "nystrom-8")
    expected = layer(x), model(ids).last_hidden_state
    with use_attention("nystrom-local-4"):
        assert torch.equal(layer(x), expected[0])
        assert torch.equal(model(ids).last_hidden_state, expected[1])


def test_without_a_head_axis_and_with_grouped_heads():
    query, key, value = heads(4, 100, 8)
    with use_attention("nystrom-8"):
        out = sdpa(query, key, value)
        grouped = sdpa(query[None], key[None, :2], value[None, :2], enable_gqa=True)
    expected = nystrom_attention(query[:, None], key[:, None], value[:, None], num_landmarks=8)
    torch.testing.assert_close(out, expected[:, 0])
    repeated = (x[None, :2].repeat_interleave(2, dim=1) for x in (key, value))
    torch.testing.assert_close(grouped, nystrom_attention(query[None], *repeated, num_landmarks=8))


def test_padding_needs_to_know_whether_it_is_self_attention():
    query, key, value = heads(2, 4, 100, 8)
    mask = torch.arange(100) < torch.tensor([[100], [60]])
    with use_attention("nystrom-8"), pytest.raises(ValueError, match="self_attention=True"):
        sdpa(query, key, value, attn_mask=mask[:, None, None])
    with use_attention("nystrom-8", self_attention=True):
        out = sdpa(query, key, value, attn_mask=mask[:, None, None])
        crossed = sdpa(query[:, :, :50], key, value, attn_mask=mask[:, None, None])
    torch.testing.assert_close(out, nystrom_attention(query, key, value, mask, num_landmarks=8))
    every = torch.ones(2, 50, dtype=torch.bool)
    torch.testing.assert_close(
        crossed, nystrom_attention(query[:, :, :50], key, value, query_mask=every, key_mask=mask, num_landmarks=8)
    )


@pytest.mark.parametrize(
    "given, told",
    [
        ({"is_causal": True}, "is_causal=True was given"),
        ({"dropout_p": 0.1}, "dropout_p=0.1 was given"),
        ({"attn_mask": torch.ones(9, 9).tril().bool()}, "one entry for each pair of tokens"),
        ({"attn_mask": torch.linspace(-1, 0, 9).expand(9, 9)}, "a bias on the logits"),
    ],
)
def test_what_cant_be_honored_is_refused(given, told):
    query, key, value = heads(9, 4, 9, 8)  # a mask (n, s) could be taken for (batch, length)
    with use_attention("nystrom"), pytest.raises(ValueError, match=f"scaled_dot_product_attention: .*{told}"):
        sdpa(query, key, value, **given)


def test_whole_models_inside():
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[1, 60:] = 0
    bert, ids = build("bert"), tokens()
    layer, x = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).eval(), torch.randn(2, 100, 32)
    with torch.no_grad():  # where PyTorch's layer would take its fused path
        exact = bert(ids, attention_mask=mask).last_hidden_state, layer(x)
        with use_attention("nystrom-100", self_attention=True):
            enough = bert(ids, attention_mask=mask).last_hidden_state, layer(x)
        with use_attention("nystrom-4", self_attention=True):
            coarse = bert(ids, attention_mask=mask).last_hidden_state, layer(x)
    torch.testing.assert_close(enough[0][mask.bool()], exact[0][mask.bool()], atol=1e-5, rtol=0)
    torch.testing.assert_close(enough[1], exact[1], atol=1e-5, rtol=0)
    assert all((ours - theirs).abs().max() > 1e-3 for ours, theirs in zip(coarse, exact, strict=True))


def test_bad_names_and_options_are_refused():
    with pytest.raises(ValueError, match="Did you mean 'pinv_iterations'"), use_attention("nystrom", pinv_iteration=2):
        pass
