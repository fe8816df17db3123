"""Our models with `attention="nystrom-local-…"`, on input that is long enough to be approximated."""

import pytest
import torch
from transformers import BertConfig, BertModel

from nystromformer import NystromformerForMaskedLM, NystromformerModel, nystrom_attention
from nystromformer.attention import nystrom_local_attention
from nystromformer.models.conversion import convert_model, largest_difference

LOCAL = {
    "attention": "nystrom-local-8",
    "attention_options": {"heavy_keys": 2, "block_size": 4, "core_rows": 8},
    "conv_kernel_size": None,
}
LENGTH = 90


@pytest.fixture
def model(small, lively):
    return lively(NystromformerModel(small(**LOCAL)).double())


def test_the_suffix_and_the_options_reach_every_layer(model):
    for layer in model.encoder.layer:
        options = layer.attention.self.attention.options
        assert (options.num_landmarks, options.heavy_keys, options.block_size, options.core_rows) == (8, 2, 4, 8)


def test_without_options_it_has_its_own_defaults_and_the_models_convolution(small):
    attention = NystromformerModel(small(attention="nystrom-local-64")).encoder.layer[0].attention.self.attention
    assert attention.options.num_landmarks == 64
    assert attention.conv.weight.shape == (4, 1, 5, 1)


@pytest.mark.parametrize("block_size, exact", [(4, False), (LENGTH // 2, True)], ids=["approximated", "exact"])
def test_exact_attention_comes_out_where_blocks_cover_everything_and_only_there(block_size, exact, model, small, ids):
    """The rest of this file is about input that is approximated. Both have the same parameters."""
    x = ids(2, LENGTH)
    standard = NystromformerModel(small(attention="standard", conv_kernel_size=None)).double().eval()
    local = NystromformerModel(small(**LOCAL | {"attention_options": {"block_size": block_size}})).double().eval()
    hidden = []
    for made in (standard, local):
        made.load_state_dict(model.state_dict())
        hidden.append(made(x).last_hidden_state)
    assert torch.allclose(*hidden, rtol=0, atol=1e-9) is exact


@pytest.mark.parametrize("front, back", [(0, 17), (23, 0), (6, 31)])
def test_padding_and_neighbors_change_nothing(front, back, model, ids):
    x = ids(1, LENGTH)
    alone = model(x)
    length = front + LENGTH + back
    batch, mask = ids(3, length, seed=1), torch.ones(3, length, dtype=torch.long)
    batch[0, front : front + LENGTH] = x[0]
    mask[0, :front], mask[0, front + LENGTH :] = 0, 0
    positions = torch.arange(length).expand(3, -1).clone() % 90 + model.config.position_offset
    positions[0, front : front + LENGTH] = torch.arange(LENGTH) + model.config.position_offset
    out = model(batch, attention_mask=mask, position_ids=positions)
    inside = out.last_hidden_state[:1, front : front + LENGTH]
    torch.testing.assert_close(inside, alone.last_hidden_state, rtol=0, atol=1e-9)


def test_a_saved_model_comes_back_as_it_was(model, ids, tmp_path):
    model.save_pretrained(tmp_path)
    again = NystromformerModel.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert again.config.attention == "nystrom-local-8"
    assert again.config.attention_options == LOCAL["attention_options"]
    x = ids(2, LENGTH)
    assert torch.equal(again(x).last_hidden_state, model(x).last_hidden_state)


def test_its_attention_maps_are_what_its_values_are_multiplied_with(model, ids):
    x, mask = ids(2, LENGTH), torch.arange(LENGTH) < torch.tensor([[LENGTH], [61]])
    out = model(x, attention_mask=mask.long(), output_attentions=True, output_hidden_states=True)
    attention = model.encoder.layer[0].attention.self
    hidden = out.hidden_states[0]
    value = torch.where(mask[:, None, :, None], attention._split_heads(attention.value(hidden)), 0)
    product = (out.attentions[0] @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(product, attention(hidden, mask)[0], rtol=0, atol=1e-9)


def test_agreement_with_the_source_is_measured_where_it_is_exact():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
    bert = BertModel(BertConfig(**sizes, vocab_size=100)).eval()
    converted = convert_model(bert, attention="nystrom-local-64").model
    assert largest_difference(bert, converted) < 1e-5


def test_it_takes_over_weights_that_were_trained_with_exact_attention(small, lively, ids, tmp_path):
    exact = lively(NystromformerModel(small(attention="standard", conv_kernel_size=None)))
    exact.save_pretrained(tmp_path)
    local = NystromformerModel.from_pretrained(tmp_path, attention="nystrom-local-64").eval()
    x = ids(2, 48)  # as many as are exact with 64 landmarks
    torch.testing.assert_close(local(x).last_hidden_state, exact(x).last_hidden_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("conv_kernel_size", [None, 5], ids=["plain", "convolution"])
def test_steps_of_training_lower_the_loss(conv_kernel_size, small, ids):
    torch.manual_seed(0)
    made = NystromformerForMaskedLM(small(**LOCAL | {"conv_kernel_size": conv_kernel_size})).train()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    x, mask = ids(2, LENGTH), torch.arange(LENGTH) < torch.tensor([[LENGTH], [61]])
    losses = []
    for _ in range(4):
        loss = made(x, attention_mask=mask, labels=torch.where(mask, x, -100)).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_cross_attention_is_refused_with_a_way_out():
    query, key = torch.randn(1, 2, 70, 8), torch.randn(1, 2, 90, 8)
    with pytest.raises(ValueError, match="70 queries and 90 keys: .*one sequence.*use nystrom_attention"):
        nystrom_local_attention(query, key, key)
    assert nystrom_attention(query, key, key).shape == query.shape
