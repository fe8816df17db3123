"""Rotary positions: the rotation itself, and what each attention keeps of "only distances count"."""

import pytest
import torch
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nystromformer import NystromformerForMaskedLM, NystromformerModel
from nystromformer.attention import ATTENTIONS, segment_means
from nystromformer.models.conversion import convert_own, convert_to_bert
from nystromformer.models.encoder import rotate, rotation_of

SHIFT_INVARIANT = {"standard", "nystrom", "nystrom-local", "linformer", "longformer", "agent"}
"""They see queries and keys through products and through sums with the same weights for any position."""


def rotary(small, lively, **changes):
    return lively(NystromformerModel(small(positions="rotary", **changes)).double())


def as_complex(x):
    """Pairs (j, j + d / 2) as complex numbers."""
    return torch.complex(*x.chunk(2, dim=-1))


def test_pairs_are_multiplied_by_unit_complex_numbers():
    x, places = torch.randn(2, 3, 7, 10, dtype=torch.float64), torch.tensor([[0, 1, 2, 3, 50, 4000, 9]])
    turned = rotate(x, rotation_of(places, head_dim=10, dtype=x.dtype))
    for token, place in enumerate(places[0].tolist()):
        for pair in range(5):
            angle = torch.tensor(place / 10_000 ** (2 * pair / 10), dtype=torch.float64)
            expected = as_complex(x)[:, :, token, pair] * torch.polar(torch.ones_like(angle), angle)
            torch.testing.assert_close(as_complex(turned)[:, :, token, pair], expected, rtol=0, atol=1e-12)


def test_the_same_as_in_llama():
    query, key = torch.randn(2, 4, 60, 16), torch.randn(2, 4, 60, 16)
    places = torch.arange(60)[None]
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=64)
    expected = apply_rotary_pos_emb(query, key, *LlamaRotaryEmbedding(config)(query, places))
    rotation = rotation_of(places, head_dim=16, dtype=query.dtype)
    for x, y in zip((query, key), expected, strict=True):
        torch.testing.assert_close(rotate(x, rotation), y)


def test_products_depend_on_the_distance_alone():
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def product(i, j):
        turned = [rotate(x, rotation_of(torch.tensor([[at]]), 8, x.dtype)) for x, at in ((query, i), (key, j))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(product(3, 11), product(1003, 1011))
    assert not torch.isclose(product(3, 11), product(3, 12))


def test_half_precision_is_turned_in_single():
    x = torch.randn(1, 2, 300, 32)
    rotation = rotation_of(torch.arange(300)[None], 32, torch.bfloat16)
    turned = rotate(x.bfloat16(), rotation)
    assert (rotation.cosine.dtype, turned.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(turned, rotate(x.bfloat16().float(), rotation).bfloat16())


def test_the_attention_is_given_turned_queries_and_keys_and_plain_values(small, lively, ids):
    model, x = rotary(small, lively, attention="standard", norm="pre"), ids(2, 20)
    block, seen = model.encoder.layer[0].attention, []
    block.self.attention.register_forward_pre_hook(lambda module, args: seen.extend(args[:3]))
    hidden = block.output.LayerNorm(model(x, output_hidden_states=True).hidden_states[0])
    rotation = rotation_of(model.config.position_offset + torch.arange(20)[None], 8, torch.float64)
    for got, name in zip(seen, ("query", "key", "value"), strict=True):
        expected = getattr(block.self, name)(hidden).unflatten(2, (4, 8)).transpose(1, 2)
        torch.testing.assert_close(got, expected if name == "value" else rotate(expected, rotation))


@pytest.mark.parametrize("attention", list(ATTENTIONS))
def test_only_distances_count_where_only_products_and_fixed_sums_are_used(attention, small, lively, ids):
    options = {"bucket_size": 8} if attention == "reformer" else {}  # several buckets, not all tokens in one
    model, x = rotary(small, lively, attention=attention, attention_options=options), ids(2, 120)
    mask = torch.arange(120) < torch.tensor([[120], [91]])
    outs = []
    for shift in (0, 37):
        torch.manual_seed(0)
        places = torch.arange(120)[None] + shift
        outs.append(model(x, attention_mask=mask, position_ids=places).last_hidden_state[mask])
    assert torch.allclose(*outs, rtol=0, atol=1e-9) is (attention in SHIFT_INVARIANT)


@pytest.mark.parametrize("attention", ["standard", "nystrom"])
def test_padding_on_the_left_changes_nothing_though_positions_move(attention, small, lively, ids):
    """With a learned table, tokens would be given other rows of it."""
    model, x = rotary(small, lively, attention=attention), ids(1, 40)
    padded = torch.cat((ids(1, 13, seed=1), x), dim=1)
    mask = torch.arange(53)[None] >= 13
    out = model(padded, attention_mask=mask).last_hidden_state[:, 13:]
    torch.testing.assert_close(out, model(x).last_hidden_state, rtol=0, atol=1e-9)


def test_landmarks_keep_what_turns_slowly_and_lose_what_turns_within_their_segment():
    """Keys that are all alike, in 8 segments of 64 tokens. The mean of a pair turned by θ per token has the length
    |sin(64 θ / 2) / (64 sin(θ / 2))|: nearly 0 for waves shorter than the segment, 1 for much longer ones."""
    key = torch.ones(1, 1, 512, 32, dtype=torch.float64)
    turned = rotate(key, rotation_of(torch.arange(512)[None], 32, key.dtype))
    length = as_complex(segment_means(turned, 8)).abs() / as_complex(key[..., :8, :]).abs()  # (1 1 8 16)
    angle = 10_000 ** (-torch.arange(16, dtype=torch.float64) / 16)
    expected = (torch.sin(32 * angle) / (64 * torch.sin(angle / 2))).abs()
    torch.testing.assert_close(length[0, 0], expected.expand(8, 16))
    assert (expected[:5] < 0.1).all()
    assert (expected[10:] > 0.99).all()


@pytest.mark.parametrize("attention", ["nystrom", "reformer"])
def test_there_is_no_table_and_no_longest_input(attention, small, ids):
    model = NystromformerModel(small(positions="rotary", attention=attention, max_position_embeddings=16)).eval()
    assert not any("position" in name for name in model.state_dict())
    assert model(ids(1, 100)).last_hidden_state.shape == (1, 100, 32)
    model.resize_position_embeddings(64)
    assert model.config.max_position_embeddings == 64
    with pytest.raises(ValueError, match="has no position embeddings; use positions='learned'"):
        model.get_position_embeddings()


def test_an_attention_with_parameters_for_each_position_keeps_its_longest_input(small, ids):
    model = NystromformerModel(small(positions="rotary", attention="linformer-8", max_position_embeddings=16))
    with pytest.raises(ValueError, match="length 17: .* max_length=16"):
        model(ids(1, 17))


def test_saved_and_loaded_with_its_positions(small, lively, ids, tmp_path):
    model = lively(NystromformerForMaskedLM(small(positions="rotary")))
    model.save_pretrained(tmp_path)
    loaded = NystromformerForMaskedLM.from_pretrained(tmp_path).eval()
    assert loaded.config.positions == "rotary"
    assert torch.equal(loaded(ids(2, 40)).logits, model(ids(2, 40)).logits)
    with pytest.raises(ValueError, match=r"missing weights: .*position_embeddings"):
        NystromformerForMaskedLM.from_pretrained(tmp_path, positions="learned")


def test_learned_positions_are_not_dropped_for_rotary_ones(small, tmp_path):
    NystromformerModel(small()).save_pretrained(tmp_path)
    assert NystromformerModel.from_pretrained(tmp_path).config.positions == "learned"
    with pytest.raises(ValueError, match=r"surplus weights: .*position_embeddings"):
        NystromformerModel.from_pretrained(tmp_path, positions="rotary")


def test_conversion_keeps_the_positions(small, lively, ids):
    model = rotary(small, lively)
    longer = convert_own(model, max_length=512, attention="standard").model
    assert (longer.config.positions, longer.config.max_position_embeddings) == ("rotary", 512)
    with pytest.raises(ValueError, match="positions='learned': these weights were trained with 'rotary'"):
        convert_own(model, positions="learned")
    with pytest.raises(ValueError, match="BERT needs positions='learned'"):
        convert_to_bert(model)


def test_odd_heads_are_refused(small):
    with pytest.raises(ValueError, match="heads of 3 numbers can't be turned in pairs"):
        small(positions="rotary", hidden_size=12)


def test_gradients_pass_through_checkpointing(small, ids):
    x, grads = ids(2, 30), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = NystromformerModel(small(positions="rotary")).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(x).last_hidden_state.square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, checkpointed in zip(*grads, strict=True):
        torch.testing.assert_close(plain, checkpointed)
