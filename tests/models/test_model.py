"""The encoder: padding on any side, any attention, and input that is refused."""

import copy

import pytest
import torch

from nystromformer import NystromformerModel
from nystromformer.attention import ATTENTIONS, SkipConvolution
from nystromformer.attention.registry import parse_attention_name

LRA_LIKE = {"norm": "pre", "embedding_norm": False, "type_vocab_size": 0, "pooling": "mean", "position_offset": 0}


def double(small, lively, **changes):
    return lively(NystromformerModel(small(**changes)).double())


@pytest.mark.parametrize("changes", [{}, {"add_pooler": True}, LRA_LIKE], ids=["bert", "pooler", "lra"])
@pytest.mark.parametrize("side", ["right", "left", "both", "holes"])
def test_padding_changes_nothing(changes, side, small, lively, ids):
    # a skip convolution sees how far apart tokens are, so only attention alone can't tell holes
    model = double(small, lively, **changes, conv_kernel_size=None if side == "holes" else 5)
    x = ids(1, 40)
    alone = model(x)
    valid = {"right": range(40), "left": range(20, 60), "both": range(7, 47), "holes": range(0, 120, 3)}[side]
    length = max(valid) + 1 + (5 if side in ("right", "both") else 0)
    padded, mask = ids(2, length, seed=1), torch.ones(2, length, dtype=torch.long)
    positions = torch.zeros(2, length, dtype=torch.long) + model.config.position_offset
    padded[0, valid], mask[0] = x[0], 0
    mask[0, valid] = 1
    positions[0, valid] += torch.arange(40)
    out = model(padded, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(out.last_hidden_state[:1, valid], alone.last_hidden_state, rtol=0, atol=1e-9)
    torch.testing.assert_close(out.pooler_output[:1], alone.pooler_output, rtol=0, atol=1e-9)


def test_positions_count_from_the_left_as_in_bert(small, lively, ids):
    model = double(small, lively)
    x, rows = ids(1, 30), torch.arange(30)[None] + 2
    torch.testing.assert_close(model(x).last_hidden_state, model(x, position_ids=rows).last_hidden_state)


def test_all_ones_is_the_same_as_no_mask(small, lively, ids):
    model, x = double(small, lively), ids(2, 30)
    expected = model(x).last_hidden_state
    for mask in (torch.ones(2, 30, dtype=torch.long), torch.ones(2, 30, dtype=torch.bool)):
        torch.testing.assert_close(model(x, attention_mask=mask).last_hidden_state, expected)


def test_embeddings_may_be_given(small, lively, ids):
    model, x = double(small, lively), ids(2, 30)
    given = model(inputs_embeds=model.get_input_embeddings()(x))
    torch.testing.assert_close(given.last_hidden_state, model(x).last_hidden_state)


@pytest.mark.parametrize("attention", list(ATTENTIONS))
def test_any_attention_trains_in_any_layout(attention, small, ids):
    for changes in ({}, LRA_LIKE):
        model = NystromformerModel(small(attention=attention, **changes)).train()
        mask = torch.arange(40) < torch.tensor([[40], [25]])
        model(ids(2, 40), attention_mask=mask).pooler_output.square().sum().backward()
        without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        assert not without, "DDP refuses parameters without a gradient"


def test_queries_that_serve_as_keys_need_no_key_projection(small):
    names = {name: dict(NystromformerModel(small(attention=name)).named_parameters()) for name in ATTENTIONS}
    for name, parameters in names.items():
        has_keys = any(".self.key." in key for key in parameters)
        assert has_keys is not parse_attention_name(name)[0].shares_query_key


def test_without_embedding_norm_and_types_the_first_layer_gets_plain_sums(small, lively, ids):
    model, x = double(small, lively, **LRA_LIKE), ids(1, 5)
    table = model.embeddings
    expected = table.word_embeddings(x) + table.position_embeddings.weight[:5]
    torch.testing.assert_close(model(x, output_hidden_states=True).hidden_states[0], expected)


def test_hidden_states_end_with_the_last(small, lively, ids):
    for norm in ("post", "pre"):
        out = double(small, lively, norm=norm)(ids(1, 20), output_hidden_states=True)
        assert len(out.hidden_states) == 3
        assert out.hidden_states[-1] is out.last_hidden_state


def test_pre_norm_adds_to_an_unnormalized_stream(small, lively, ids):
    model = double(small, lively, norm="pre", num_hidden_layers=1)
    x = ids(1, 6)
    layer, (start, end) = model.encoder.layer[0], model(x, output_hidden_states=True).hidden_states
    middle = start + layer.attention.output.dense(layer.attention.self(layer.attention.output.LayerNorm(start))[0])
    expected = middle + layer.output.dense(layer.intermediate(layer.output.LayerNorm(middle)))
    torch.testing.assert_close(end, model.encoder.norm(expected))


def test_outputs_come_as_a_tuple_when_asked(small, lively, ids):
    model, x = double(small, lively), ids(1, 9)
    states, pooled = model(x, return_dict=False)
    assert torch.equal(states, model(x).last_hidden_state)
    assert torch.equal(pooled, states[:, 0])


@pytest.mark.parametrize("attention", ["standard", "nystrom-8", "nystrom-64"])
def test_attention_maps_on_request_multiply_the_values_to_the_output(attention, small, lively, ids):
    model = double(small, lively, attention=attention, conv_kernel_size=None)
    x, mask = ids(2, 30), torch.arange(30) < torch.tensor([[30], [21]])
    assert model(x, attention_mask=mask).attentions is None
    out = model(x, attention_mask=mask, output_attentions=True, output_hidden_states=True)
    assert [tuple(weights.shape) for weights in out.attentions] == [(2, 4, 30, 30)] * 2
    block = model.encoder.layer[0].attention.self
    value = block._split_heads(block.value(out.hidden_states[0]))
    expected, _ = block(out.hidden_states[0], mask)
    product = (out.attentions[0] @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(product, expected, rtol=0, atol=1e-9)


def test_attention_maps_are_refused_where_there_are_none(small, ids):
    with pytest.raises(ValueError, match="ReformerAttention has no attention matrix to show; use attention='standard'"):
        NystromformerModel(small(attention="reformer"))(ids(1, 9), output_attentions=True)
    with pytest.raises(ValueError, match="1025 tokens: at most 1024.*attention.weights"):
        NystromformerModel(small(max_position_embeddings=2000))(ids(1, 1025), output_attentions=True)


@pytest.mark.parametrize(
    "mask, error, message",
    [
        (torch.ones(2, 1, 30, 30), ValueError, r"must be \(2, 30\).*masks over pairs of tokens"),
        (torch.ones(30, dtype=torch.long), ValueError, r"must be \(2, 30\)"),
        (torch.ones(2, 29, dtype=torch.long), ValueError, r"\(2, 29\): must be \(2, 30\)"),
        (torch.zeros(2, 30), TypeError, "float32: must be boolean or whole numbers"),
        (torch.arange(60).view(2, 30), ValueError, "values besides 0 and 1"),
        ([[1] * 30] * 2, TypeError, "is a list: must be a tensor"),
    ],
    ids=["4-d", "1-d", "length", "float", "packed", "list"],
)
def test_masks_of_another_kind_are_refused(mask, error, message, small, ids):
    with pytest.raises(error, match=message):
        NystromformerModel(small())(ids(2, 30), attention_mask=mask)


def test_longer_input_than_the_position_table_is_refused_with_the_remedy(small, ids):
    model = NystromformerModel(small())
    with pytest.raises(
        ValueError, match=r"length 129.*128 tokens.*max_length=128.*resize_position_embeddings\(129\).*convert"
    ):
        model(ids(1, 129))
    model.resize_position_embeddings(129)
    assert model(ids(1, 129)).last_hidden_state.shape == (1, 129, 32)


def test_exactly_one_input_must_be_given(small, ids):
    model = NystromformerModel(small())
    with pytest.raises(ValueError, match="neither given; give exactly one"):
        model()
    with pytest.raises(ValueError, match="both given; give exactly one"):
        model(ids(1, 5), inputs_embeds=torch.zeros(1, 5, 32))
    with pytest.raises(ValueError, match=r"input_ids has shape \(5\): must be \(batch, length\)"):
        model(ids(1, 5)[0])
    with pytest.raises(ValueError, match=r"must be \(batch, length, 32\)"):
        model(inputs_embeds=torch.zeros(1, 5, 31))
    with pytest.raises(ValueError, match=r"without token types.*return_token_type_ids=False"):
        NystromformerModel(small(**LRA_LIKE))(ids(1, 5), token_type_ids=ids(1, 5))


@pytest.mark.parametrize("attention", ["standard", "nystrom", "nystrom-local", "longformer", "linear"])
def test_gradients_of_the_output_reach_the_attention_matrices(attention, small, lively, ids):
    model, x = lively(NystromformerModel(small(attention=attention))), ids(2, 100)
    mask = torch.ones_like(x)
    mask[1, 60:] = 0
    out = model(x, attention_mask=mask, output_attentions=True)
    plain = model(x, attention_mask=mask)
    torch.testing.assert_close(
        out.last_hidden_state[mask.bool()], plain.last_hidden_state[mask.bool()], atol=1e-4, rtol=0
    )
    for weights in out.attentions:
        weights.retain_grad()
    out.last_hidden_state[mask.bool()].square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.encoder.parameters()]
    assert all(weights.grad.abs().max() > 0 for weights in out.attentions)
    model.zero_grad()
    plain.last_hidden_state[mask.bool()].square().sum().backward()
    for parameter, gradient in zip(model.encoder.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-3, rtol=1e-2)


def test_a_convolution_that_takes_anothers_place_is_used(small, lively, ids):
    """As PEFT does with modules to save."""
    model, x = lively(NystromformerModel(small())), ids(2, 100)
    copied = copy.deepcopy(model)
    block = copied.encoder.layer[0].attention.self
    block.conv = SkipConvolution(*block.conv.weight.shape[::2])
    assert (copied(x).last_hidden_state - model(x).last_hidden_state).abs().max() > 1e-3
    copied(x).last_hidden_state.square().sum().backward()
    assert block.conv.weight.grad.abs().max() > 0
    assert [name for name in copied.state_dict() if "conv" in name] == [n for n in model.state_dict() if "conv" in n]
