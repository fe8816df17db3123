"""Conversion: random models of every layout, and real MiniLM weights, compute the same before and after."""

import pytest
import torch
import transformers

from nystromformer.models import NystromformerConfig, NystromformerForMaskedLM, NystromformerModel
from nystromformer.models.conversion import (
    convert_model,
    convert_own,
    convert_to_bert,
    grouped,
    largest_difference,
    load_source,
)

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 66,
}
KINDS = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]
FAMILIES = {"Bert": {"pad_token_id": 0}, "Roberta": {"pad_token_id": 1}, "XLMRoberta": {"pad_token_id": 3},
            "Camembert": {"pad_token_id": 1}}  # fmt: skip


def standard(family, kind, lively, **changes):
    config = getattr(transformers, family + "Config")(
        **SIZES | FAMILIES[family] | {"num_labels": 2 if kind == "ForQuestionAnswering" else 3} | changes
    )
    return lively(getattr(transformers, family + kind)(config))


def first(out):
    return [x for x in out.to_tuple() if torch.is_tensor(x)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_converted_model_computes_the_same_with_enough_landmarks(family, kind, lively, ids):
    source = standard(family, kind, lively)
    conversion = convert_model(source, num_landmarks=64)
    assert type(conversion.model).__name__ == "Nystromformer" + kind
    x, mask = ids(2, 60), torch.arange(60) < torch.tensor([[60], [43]])
    x = torch.where(mask, x, FAMILIES[family]["pad_token_id"])
    for ours, theirs in zip(
        *(first(m(x, attention_mask=mask.long())) for m in (conversion.model, source)), strict=True
    ):
        if ours.shape[:2] == mask.shape:  # rows of padding are zero after our attention, and anything in theirs
            ours, theirs = ours[mask], theirs[mask]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_pretraining_heads_are_kept(lively, ids):
    source = standard("Bert", "ForPreTraining", lively)
    model = convert_model(source, num_landmarks=64).model
    for ours, theirs in zip(first(model(ids(2, 30))), first(source(ids(2, 30))), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_every_weight_is_accounted_for(lively):
    source = standard("Bert", "ForMultipleChoice", lively)
    conversion = convert_model(source)
    assert isinstance(conversion.model, NystromformerModel)
    assert {row.source for row in conversion.rows if row.source} == set(source.state_dict())
    assert {row.target for row in conversion.rows if row.target} == set(conversion.model.state_dict())
    assert {row.source for row in conversion.rows if row.status == "left"} == {"classifier.weight", "classifier.bias"}
    new = [row for row in conversion.rows if row.status == "new"]
    assert {row.note for row in new} == {"zero: no effect until trained"}
    assert len(new) == 2
    row = next(row for row in grouped(conversion.rows) if "query" in row.source)
    assert (row.source, row.count) == ("bert.encoder.layer.*.attention.self.query.weight, bias", 4)


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_positions_are_tiled(family, lively, ids):
    source = standard(family, "Model", lively)
    model = convert_model(source, max_length=200, num_landmarks=256).model
    table, before = model.get_position_embeddings().weight, source.embeddings.position_embeddings.weight
    offset = {"Bert": 0, "Roberta": 2}[family]
    length = 66 - offset
    assert model.config.max_position_embeddings == 200
    assert torch.equal(table[: length + offset], before)
    assert torch.equal(table[offset + length : offset + 2 * length], before[offset:])
    x = ids(1, length)
    torch.testing.assert_close(model(x)[0], source(x)[0], rtol=0, atol=1e-4)
    assert model(ids(1, 200))[0].shape == (1, 200, 32)


def test_any_attention_can_be_chosen(lively):
    source = standard("Bert", "Model", lively)
    for attention in ("standard", "linformer-16", "reformer"):
        conversion = convert_model(source, attention=attention)
        assert conversion.model.config.attention == attention
    left = {row.source.split(".")[-2] for row in conversion.rows if row.status == "left"}
    assert left == {"key"}


def test_a_head_with_another_activation_is_not_taken_for_the_same(lively):
    rows = convert_model(standard("Roberta", "ForMaskedLM", lively, hidden_act="relu")).rows
    assert {row.source for row in rows if row.status == "left"} >= {"lm_head.dense.weight", "lm_head.bias"}


@pytest.mark.parametrize("kind", [*KINDS, "ForPreTraining"])
def test_the_way_back_gives_the_same_bert(kind, lively, ids):
    source = standard("Bert", kind, lively)
    back = convert_to_bert(convert_model(source).model)
    assert type(back.model) is type(source)
    assert not [row for row in back.rows if row.status == "new"]
    for ours, theirs in zip(first(back.model(ids(2, 30))), first(source(ids(2, 30))), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_way_back_says_what_bert_lacks(small, lively, ids):
    ours = lively(NystromformerForMaskedLM(small(type_vocab_size=0, num_landmarks=64)))
    back = convert_to_bert(ours)
    left = {row.note for row in back.rows if row.status == "left"}
    assert left == {"BERT has no skip convolution; it was not zero, so results differ"}
    for layer in ours.nystromformer.encoder.layer:
        layer.attention.self.conv.weight.data.zero_()
    x = ids(1, 40)
    torch.testing.assert_close(convert_to_bert(ours).model(x).logits, ours(x).logits, rtol=0, atol=1e-4)
    for changes in ({"norm": "pre"}, {"embedding_norm": False}, {"attention": "reformer"}):
        with pytest.raises(ValueError, match="BERT needs .*can't be converted to BERT"):
            convert_to_bert(NystromformerModel(small(**changes)))


def test_own_models_get_longer_positions_or_another_attention(small, lively, ids):
    source = lively(NystromformerForMaskedLM(small(attention="nystrom-16")))
    longer = convert_own(source, max_length=256).model
    assert torch.equal(longer(ids(1, 100)).logits, source(ids(1, 100)).logits)
    changed = convert_own(source, attention="nystrom-128", conv_kernel_size=9)
    assert changed.model.config.num_landmarks == 128
    assert {(row.status, row.shape[2]) for row in changed.rows if ".conv." in row.source + row.target} == {
        ("left", 5),
        ("new", 9),
    }
    assert largest_difference(source, longer) == 0


def test_what_can_not_be_converted_is_refused(lively):
    with pytest.raises(ValueError, match="model_type 'gpt2': can convert bert, roberta"):
        convert_model(transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1)))
    with pytest.raises(ValueError, match="is_decoder=True: Nyström attention can't be causal"):
        convert_model(standard("Bert", "Model", lively, is_decoder=True))
    with pytest.raises(ValueError, match="only 'absolute' positions"):
        convert_model(standard("Bert", "Model", lively, position_embedding_type="relative_key"))
    with pytest.raises(ValueError, match="max_length=0: must be at least 1"):
        convert_model(standard("Bert", "Model", lively), max_length=0)


def test_real_minilm_keeps_its_hidden_states(minilm):
    source, surplus = load_source(minilm)
    conversion = convert_model(source, num_landmarks=128)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    texts = ["Linear attention " * 40, "A short sentence.", "Nyström approximated kernels with landmarks. " * 6]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
    mask = batch["attention_mask"].bool()
    ours, theirs = (m(**batch, output_hidden_states=True) for m in (conversion.model, source))
    for a, b in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        torch.testing.assert_close(a[mask], b[mask], rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.pooler_output, theirs.pooler_output, rtol=0, atol=1e-4)
    assert not [row for row in conversion.rows + surplus if row.status == "left"]
    assert largest_difference(source, conversion.model) < 1e-4


def test_only_exact_attention_is_compared(small):
    config = NystromformerConfig(**small().to_dict() | {"attention": "linear"})
    assert largest_difference(NystromformerModel(config), NystromformerModel(config)) is None
