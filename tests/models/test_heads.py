"""Heads and their losses, against torch's losses on all logits."""

import inspect

import pytest
import torch
from torch.nn import functional

from nystromformer.models.heads import (
    NystromformerForMultipleChoice,
    NystromformerForQuestionAnswering,
    NystromformerForSequenceClassification,
    NystromformerForTokenClassification,
)
from nystromformer.models.pretraining_heads import NystromformerForMaskedLM, NystromformerForPreTraining


def masked(x, share=0.15, seed=3):
    """MLM labels: -100 except at some tokens."""
    chosen = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < share
    return torch.where(chosen, x, -100)


def gradients(model, loss):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))


def test_masked_lm_loss_is_that_of_all_logits(small, lively, ids):
    model, x = lively(NystromformerForMaskedLM(small()).double()), ids(3, 40)
    labels = masked(x)
    out, logits = model(x, labels=labels), model(x).logits
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(out.loss.double(), expected, rtol=1e-5, atol=1e-6)
    theirs, ours = gradients(model, expected), gradients(model, out.loss)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=name)


def test_the_vocabulary_is_met_at_masked_positions_only(small, ids):
    model, x = NystromformerForMaskedLM(small()), ids(3, 40)
    labels, seen = masked(x), []
    model.cls.predictions.decoder.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    assert model(x, labels=labels).logits is None
    assert seen == [(int((labels != -100).sum()), 100)]
    assert model(x, labels=labels, output_logits=True).logits.shape == (3, 40, 100)
    assert model(x).logits.shape == (3, 40, 100)


def test_evaluation_returns_logits_beside_the_loss(small, ids):
    model, x = NystromformerForMaskedLM(small()).eval(), ids(3, 40)
    out = model(x, labels=masked(x))
    torch.testing.assert_close(out.logits, model(x).logits)
    assert model(x, labels=masked(x), output_logits=False).logits is None


def test_a_head_takes_the_inputs_of_the_encoder_and_its_own(small, ids):
    encoder = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds"}
    own = {
        NystromformerForMaskedLM: {"labels", "output_logits", "num_items_in_batch"},
        NystromformerForMultipleChoice: {"labels", "num_items_in_batch"},
        NystromformerForPreTraining: {"labels", "sentence_order_label", "output_logits", "num_items_in_batch"},
        NystromformerForQuestionAnswering: {"start_positions", "end_positions"},
        NystromformerForSequenceClassification: {"labels", "num_items_in_batch"},
        NystromformerForTokenClassification: {"labels", "num_items_in_batch"},
    }
    borders = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    for model, names in own.items():
        taken = inspect.signature(model(small()).forward).parameters.keys()
        assert taken == encoder | names | borders | {"output_attentions", "output_hidden_states"}
    with pytest.raises(TypeError, match="label"):
        NystromformerForTokenClassification(small())(ids(1, 8), label=ids(1, 8))


def test_a_batch_without_masked_tokens_costs_nothing(small, ids):
    model, x = NystromformerForMaskedLM(small()), ids(2, 20)
    loss = model(x, labels=torch.full_like(x, -100)).loss
    loss.backward()
    assert loss.item() == 0
    assert model(x, labels=torch.full_like(x, -100), num_items_in_batch=torch.tensor(0)).loss == 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "problem, num_labels, labels, reference",
    [
        ("single_label_classification", 3, torch.tensor([0, 2, 1, 1]), functional.cross_entropy),
        ("regression", 1, torch.tensor([0.5, 2.0, -1.0, 3.0]), lambda a, b: functional.mse_loss(a[:, 0], b)),
        ("regression", 3, torch.arange(12.0).view(4, 3), functional.mse_loss),
        ("multi_label_classification", 3, (torch.arange(12).view(4, 3) % 2).float(),
         functional.binary_cross_entropy_with_logits),
    ],
    ids=["classes", "number", "numbers", "several"],
)  # fmt: skip
def test_sequence_losses(problem, num_labels, labels, reference, small, lively, ids):
    model = lively(NystromformerForSequenceClassification(small(num_labels=num_labels)))
    model.config.problem_type = problem if num_labels > 1 else None
    x = ids(4, 20)
    out = model(x, labels=labels)
    torch.testing.assert_close(out.loss, reference(out.logits, labels), rtol=1e-5, atol=1e-5)
    # in halves, with the whole's count, they add up: what HF Trainer does when it accumulates gradients
    count = (labels != -100).sum()
    halves = [model(x[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=count).loss for i in (0, 2)]
    torch.testing.assert_close(sum(halves), out.loss, rtol=1e-5, atol=1e-5)


def test_the_problem_is_told_by_the_labels(small, ids):
    model, x = NystromformerForSequenceClassification(small(num_labels=3)), ids(2, 9)
    one = model(x, labels=torch.tensor([0, 2])).loss
    several = model(x, labels=torch.tensor([[1.0, 0, 0], [0, 1, 1]])).loss
    assert model.config.problem_type is None, "a first batch must not decide for the next"
    assert abs(one - several) > 0.1
    with pytest.raises(ValueError, match="needs as many numbers"):
        model(x, labels=torch.tensor([0.5, 2.0]))


def test_lras_classifier_is_one_of_its_forms(small, ids):
    head = NystromformerForSequenceClassification(
        small(classifier_size=128, classifier_activation="relu", classifier_dropout=0.0, num_labels=10)
    ).classifier
    pooled = torch.randn(2, 32)
    expected = head.out_proj(functional.relu(head.dense(pooled)))
    assert head.dense.out_features == 128
    torch.testing.assert_close(head.train()(pooled), expected)


def test_token_loss_leaves_out_ignored_tokens(small, lively, ids):
    model, x = lively(NystromformerForTokenClassification(small(num_labels=5))), ids(2, 20)
    labels = masked(x % 5, share=0.5)
    out = model(x, labels=labels)
    torch.testing.assert_close(out.loss, functional.cross_entropy(out.logits.flatten(0, 1), labels.flatten()))
    with pytest.raises(ValueError, match=r"labels have shape \(2\): must be \(2, 20\)"):
        model(x, labels=labels[:, 0])


def test_question_answering_leaves_out_answers_that_were_cut_off(small, lively, ids):
    model, x = lively(NystromformerForQuestionAnswering(small())), ids(3, 20)
    out = model(x, start_positions=torch.tensor([2, 5, 25]), end_positions=torch.tensor([4, 30, -1]))
    start = functional.cross_entropy(out.start_logits[:2], torch.tensor([2, 5]))
    end = functional.cross_entropy(out.end_logits[:1], torch.tensor([4]))
    torch.testing.assert_close(out.loss, (start + end) / 2)
    assert model(x, start_positions=torch.tensor([20] * 3), end_positions=torch.tensor([20] * 3)).loss == 0


def test_multiple_choice_compares_the_choices(small, lively, ids):
    model, x = lively(NystromformerForMultipleChoice(small())), ids(6, 20).view(2, 3, 20)
    mask = (torch.arange(20) < torch.tensor([20, 15, 9]).view(1, 3, 1)).expand(2, 3, 20)
    out = model(x, attention_mask=mask.long(), labels=torch.tensor([2, 0]))
    torch.testing.assert_close(out.loss, functional.cross_entropy(out.logits, torch.tensor([2, 0])))
    alone = model(x[1:, 2:, :9], labels=None).logits
    torch.testing.assert_close(out.logits[1:, 2:], alone, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=r"\(3, 20\): must be input_ids \(b, choices, n\)"):
        model(x[0])


def test_pretraining_adds_two_means(small, lively, ids):
    model, x = lively(NystromformerForPreTraining(small(add_pooler=True))), ids(4, 30)
    labels, order = masked(x), torch.tensor([0, 1, -100, 1])
    out = model(x, labels=labels, sentence_order_label=order, output_logits=True)
    mlm = functional.cross_entropy(out.prediction_logits.flatten(0, 1), labels.flatten())
    sop = functional.cross_entropy(out.seq_relationship_logits, order)
    torch.testing.assert_close(out.loss, mlm + sop)
    torch.testing.assert_close(out.mlm_loss_sum / out.mlm_count, mlm)
    assert int(out.mlm_correct) == int((out.prediction_logits.argmax(-1) == labels).sum())
    assert (int(out.sop_count), int(out.sop_correct)) == (
        3,
        int((out.seq_relationship_logits.argmax(-1) == order).sum()),
    )
    torch.testing.assert_close(model(x, labels=labels).loss, mlm)
    torch.testing.assert_close(model(x, sentence_order_label=order).loss, sop)
    assert model(x).loss is None


def test_the_words_are_resized_with_their_bias(small, ids):
    model = NystromformerForMaskedLM(small())
    model.resize_token_embeddings(110)
    head = model.cls.predictions
    assert model(ids(1, 5)).logits.shape == (1, 5, 110)
    assert head.decoder.weight is model.get_input_embeddings().weight
    assert head.bias is head.decoder.bias
