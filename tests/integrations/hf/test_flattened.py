"""Flattened batches in encoders of Transformers: each sequence gives what it gives alone."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DataCollatorWithFlattening,
    ModernBertConfig,
    ModernBertModel,
)

import nystromformer

LENGTHS = [7, 1, 40, 22]
OPTIONS = {"num_landmarks": 8, "exact_below": None}
SIZES = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def registered():
    nystromformer.register()


def build(model_class=BertModel, name="nystrom", **changes):
    torch.manual_seed(0)
    modern = model_class is ModernBertModel
    extra = {"pad_token_id": 0, "local_attention": 8, "global_attn_every_n_layers": 2} if modern else {}
    config = (ModernBertConfig if modern else BertConfig)(**SIZES, **extra, **changes)
    config.attention_options = {**OPTIONS, **({"block_size": 4} if name == "nystrom-local" else {})}
    config._attn_implementation = name
    return model_class(config).double().eval()


def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 50, (length,), generator=generator) for length in LENGTHS]


def collated(told_by):
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=told_by == "cu_seq_lens")
    batch = dict(collator([{"input_ids": ids} for ids in texts()]))
    del batch["labels"]
    return batch


def assert_as_alone(model, batch):
    expected = torch.cat([model(ids[None])[0] for ids in texts()], dim=1)
    found = model(**batch)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    parameters = [x for name, x in model.named_parameters() if "pooler" not in name]
    grads = [torch.autograd.grad(out.sin().sum(), parameters, allow_unused=True) for out in (found, expected)]
    for x, y in zip(*grads, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


@pytest.mark.parametrize("told_by", ["cu_seq_lens", "position_ids"])
@pytest.mark.parametrize("name", ["nystrom", "nystrom-local"])
@pytest.mark.parametrize("model_class", [BertModel, BertForMaskedLM, ModernBertModel])
def test_each_sequence_gives_what_it_gives_alone_with_gradients(model_class, name, told_by):
    assert_as_alone(build(model_class, name), collated(told_by))


def test_a_skip_convolution_never_crosses_borders():
    model = build()
    nystromformer.add_skip_convolution(model, kernel_size=5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    assert_as_alone(model, collated("cu_seq_lens"))


def test_an_attention_that_was_set_later():
    model = build(name="sdpa")
    exact = torch.cat([model(ids[None])[0] for ids in texts()], dim=1)
    model.set_attn_implementation("nystrom")
    model.config.attention_options = {"num_landmarks": 64}
    torch.testing.assert_close(model(**collated("position_ids"))[0], exact, rtol=0, atol=1e-9)


def test_short_sequences_are_exact_by_default():
    model = build()
    model.config.attention_options = {}
    sdpa = build(name="sdpa")
    expected = torch.cat([sdpa(ids[None])[0] for ids in texts()], dim=1)
    torch.testing.assert_close(model(**collated("cu_seq_lens"))[0], expected, rtol=0, atol=1e-9)


def test_what_can_not_be_served_is_refused():
    model, batch = build(), collated("cu_seq_lens")
    with pytest.raises(ValueError, match="attention_mask was given with cu_seq_lens_q: a flattened batch"):
        model(**batch, attention_mask=torch.arange(70)[None] > 2)
    with pytest.raises(ValueError, match="is asked for its matrix in a flattened batch"):
        model(**batch, output_attentions=True)
    with pytest.raises(ValueError, match="goes from 0 to 69: must go from 0 to 70"):
        model(batch["input_ids"], cu_seq_lens_q=torch.tensor([0, 69]), cu_seq_lens_k=torch.tensor([0, 69]))
    with pytest.raises(ValueError, match="a flattened batch has 2 rows: must be one"):
        model(torch.full((2, 6), 7), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]] * 2))
