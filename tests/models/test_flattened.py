"""Flattened batches: sequences in one row give what each gives alone, as the collator of Transformers makes them."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from nystromformer import (
    NystromformerConfig,
    NystromformerForMaskedLM,
    NystromformerForPreTraining,
    NystromformerForQuestionAnswering,
    NystromformerForSequenceClassification,
    NystromformerForTokenClassification,
    NystromformerModel,
)
from nystromformer.models.flattened import restarts
from nystromformer.models.lra import NystromformerForLongRangeArena, lra_config

LENGTHS = [7, 1, 40, 22]
SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "num_landmarks": 8,
    "conv_kernel_size": 5,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
}


def build(model_class=NystromformerModel, **changes):
    torch.manual_seed(0)
    return model_class(NystromformerConfig(**SIZES | changes)).double().eval()


def texts(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 50, (length,), generator=generator) for length in lengths]


def collated(told_by="cu_seq_lens", **options):
    collator = DataCollatorWithFlattening(
        return_flash_attn_kwargs=told_by != "position_ids", return_position_ids=told_by != "cu_seq_lens", **options
    )
    batch = dict(collator([{"input_ids": ids} for ids in texts()]))
    del batch["labels"]
    return batch


def alone(model, **named):
    return [model(ids[None], **named) for ids in texts()]


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


@pytest.mark.parametrize("told_by", ["cu_seq_lens", "position_ids", "both"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_each_sequence_gives_what_it_gives_alone_with_gradients(told_by, pooling):
    model = build(pooling=pooling)
    out, single = model(**collated(told_by)), alone(model)
    expected = torch.cat([each.last_hidden_state for each in single], dim=1)
    torch.testing.assert_close(out.last_hidden_state, expected, rtol=0, atol=1e-9)
    pooled = torch.cat([each.pooler_output for each in single])
    torch.testing.assert_close(out.pooler_output, pooled, rtol=0, atol=1e-9)
    found = gradients(out.last_hidden_state.sin().sum() + out.pooler_output.cos().sum(), model)
    wanted = gradients(expected.sin().sum() + pooled.cos().sum(), model)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": "nystrom-local", "attention_options": {"block_size": 4}},
        {"attention": "standard"},
        {"attention": "linformer-16"},
        {"positions": "rotary"},
        {"norm": "pre", "type_vocab_size": 0},
        {"position_offset": 0},
    ],
    ids=str,
)
def test_other_models_too(changes):
    model = build(**changes)
    out = model(**collated())
    expected = torch.cat([each.last_hidden_state for each in alone(model)], dim=1)
    torch.testing.assert_close(out.last_hidden_state, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("start", [0, 2])
def test_where_the_collator_starts_to_count_changes_nothing(start):
    model = build()
    assert model.config.position_offset == 2
    out = model(**collated("position_ids", position_ids_start=start))
    assert torch.equal(out.last_hidden_state, model(**collated()).last_hidden_state)


def test_hidden_states_and_gradient_checkpointing():
    model = build().train()
    out = model(**collated(), output_hidden_states=True)
    assert [each.shape for each in out.hidden_states] == [(1, sum(LENGTHS), 16)] * 3
    expected = gradients(out.pooler_output.sin().sum(), model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for x, y in zip(gradients(model(**collated()).pooler_output.sin().sum(), model), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_classifiers_pool_each_sequence():
    model, labels = build(NystromformerForSequenceClassification, num_labels=3), torch.tensor([0, 2, 1, 1])
    out = model(**collated(), labels=labels)
    single = torch.cat([each.logits for each in alone(model)])
    torch.testing.assert_close(out.logits, single, rtol=0, atol=1e-9)
    expected = torch.nn.functional.cross_entropy(single.float(), labels)
    torch.testing.assert_close(out.loss, expected)


@pytest.mark.parametrize("model_class", [NystromformerForTokenClassification, NystromformerForMaskedLM])
def test_heads_of_tokens(model_class):
    model = build(model_class)
    expected = torch.cat([each.logits for each in alone(model)], dim=1)
    torch.testing.assert_close(model(**collated()).logits, expected, rtol=0, atol=1e-9)


def test_pretraining_judges_the_order_of_each_sequence():
    model = build(NystromformerForPreTraining)
    out = model(**collated())
    expected = torch.cat([each.seq_relationship_logits for each in alone(model)])
    torch.testing.assert_close(out.seq_relationship_logits, expected, rtol=0, atol=1e-9)


def test_a_loss_over_the_tokens_of_several_sequences_is_refused():
    model, places = build(NystromformerForQuestionAnswering), torch.zeros(4, dtype=torch.long)
    assert model(**collated()).start_logits.shape == (1, sum(LENGTHS))
    with pytest.raises(ValueError, match="4 positions were given for 1 rows of tokens: must be as many"):
        model(**collated(), start_positions=places, end_positions=places)


@pytest.mark.parametrize("pooled_length", [None, 64])
@pytest.mark.parametrize("pair", [False, True], ids=["single", "pair"])
def test_long_range_arena(pair, pooled_length):
    torch.manual_seed(0)
    config = lra_config(num_landmarks=8, vocab_size=50, max_position_embeddings=64, num_labels=3, pair=pair)
    config.pooled_length = pooled_length
    model = NystromformerForLongRangeArena(config).double().eval()
    borders = torch.tensor([0, *LENGTHS]).cumsum(0)
    out = model(torch.cat(texts())[None], cu_seq_lens_q=borders, labels=torch.tensor([0, 2] if pair else [0, 2, 1, 1]))
    mask = torch.arange(40) < torch.tensor(LENGTHS)[:, None]
    padded = torch.zeros(4, 40, dtype=torch.long).masked_scatter(mask, torch.cat(texts()))
    shape = (2, 2, 40) if pair else (4, 40)
    torch.testing.assert_close(out.logits, model(padded.view(shape), mask.view(shape)).logits, rtol=0, atol=1e-9)
    assert out.loss.isfinite()
    if pair:
        with pytest.raises(ValueError, match="cu_seq_lens_q has 3 sequences: must be an even number, since pair=True"):
            model(torch.cat(texts())[None], cu_seq_lens_q=borders[[0, 1, 2, 4]])


def test_positions_that_are_given_and_not_counted_anew_are_rows_of_the_table():
    assert restarts(torch.tensor([[0, 1, 2]])) is None
    assert restarts(torch.tensor([[2, 3, 4, 1, 1]])) is None, "padding"
    assert restarts(torch.tensor([[5, 3, 9]])) is None
    assert restarts(torch.tensor([[2, 3, 2, 3, 4]])).tolist() == [0, 2, 5]


def test_what_does_not_fit_is_refused():
    model, batch = build(), collated()
    with pytest.raises(ValueError, match="attention_mask was given with cu_seq_lens_q: a flattened batch"):
        model(**batch, attention_mask=torch.arange(sum(LENGTHS))[None] > 2)
    with pytest.raises(ValueError, match="a flattened batch has 2 rows: must be one"):
        model(torch.full((2, 35), 7), cu_seq_lens_q=batch["cu_seq_lens_q"])
    with pytest.raises(ValueError, match="cu_seq_lens_q says that sequence 1 is empty"):
        model(batch["input_ids"], cu_seq_lens_q=torch.tensor([0, 7, 7, 70]))
    with pytest.raises(ValueError, match=r"position_ids begin anew at \[7, 8, 48\] and cu_seq_lens_q at \[9\]"):
        model(batch["input_ids"], cu_seq_lens_q=torch.tensor([0, 9, 70]), position_ids=collated("both")["position_ids"])
    with pytest.raises(ValueError, match="output_attentions=True with a flattened batch: must be False"):
        model(**batch, output_attentions=True)
    with pytest.raises(ValueError, match="length 70: the position table has room for 64 tokens"):
        model(batch["input_ids"], cu_seq_lens_q=torch.tensor([0, 70]))


@pytest.mark.slow
def test_compiles_as_one_graph_for_a_fixed_number_of_sequences():
    model, batch = build(), collated()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    out = compiled(batch["input_ids"], cu_seq_lens_q=batch["cu_seq_lens_q"])
    torch.testing.assert_close(out.pooler_output, model(**batch).pooler_output, rtol=0, atol=1e-9)
