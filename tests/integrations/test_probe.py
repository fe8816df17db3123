"""Other attentions in a model's place: captured calls are what the model uses, errors are what they say."""

import pytest
import torch
from encoders import build, switch, tokens
from torch.nn import functional

from nystromformer import nystrom_attention
from nystromformer.integrations.probe import exact_attention, exact_map, head_errors, record_calls, swap_attention


def padded():
    return torch.arange(100) < torch.tensor([[100], [60]])


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_exact_attention_in_its_place_changes_nothing(name):
    model, ids, mask = build(name), tokens(), padded()
    before = model(ids, attention_mask=mask.long()).last_hidden_state
    calls, output = record_calls(model, input_ids=ids, attention_mask=mask.long())
    torch.testing.assert_close(output.last_hidden_state[mask], before[mask], atol=1e-5, rtol=0)
    assert len(calls) == 2
    assert [call.radius for call in calls] == ([None, 8] if name == "modernbert" else [None, None])
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(ids, attention_mask=mask.long()).last_hidden_state, before)


def test_any_attention_can_take_its_place():
    model, ids, mask = build("bert"), tokens(), padded()
    attend = lambda call: nystrom_attention(
        call.query, call.key, call.value, call.key_mask, num_landmarks=8, scale=call.scale
    )
    with swap_attention(model, attend):
        other = model(ids, attention_mask=mask.long()).last_hidden_state
    expected = switch(model, 8)(ids, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(other, expected)


def test_an_error_inside_leaves_the_model_as_it_was():
    model = build("bert")
    with pytest.raises(ZeroDivisionError), swap_attention(model, lambda call: 1 / 0):
        model(tokens())
    assert model.config._attn_implementation == "sdpa"


def test_errors_are_relative_frobenius_norms():
    calls, _ = record_calls(build("bert"), input_ids=tokens(), attention_mask=padded().long())
    errors = head_errors(calls[0], "nystrom-8")
    call = calls[0]
    for example, length in enumerate((100, 60)):
        query, key, value = (x[example, :, :length] for x in (call.query, call.key, call.value))
        exact = torch.softmax(query @ key.mT * call.scale, dim=-1)
        torch.testing.assert_close(exact_map(call)[example, :, :length, :length], exact)
        identity = torch.eye(length).expand(4, length, length)
        approximation = nystrom_attention(query[None], key[None], identity[None], num_landmarks=8, scale=call.scale)[0]
        matrix = (approximation - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
        torch.testing.assert_close(errors.matrix[example], matrix, atol=1e-5, rtol=1e-4)
        output = ((approximation - exact) @ value).norm(dim=(1, 2)) / (exact @ value).norm(dim=(1, 2))
        torch.testing.assert_close(errors.output[example], output, atol=1e-5, rtol=1e-4)


def test_exact_attention_is_softmax_attention():
    calls, _ = record_calls(build("bert"), input_ids=tokens())
    call = calls[1]
    expected = functional.scaled_dot_product_attention(call.query, call.key, call.value)
    torch.testing.assert_close(exact_attention(call), expected)
