"""The model of self-pretraining: what it is asked, and that a classifier takes its encoder over."""

import pytest
import torch

from nystromformer.models.lra import NystromformerForLongRangeArena, NystromformerForMaskedTokens, lra_config


def build(**changes):
    torch.manual_seed(0)
    fields = {"attention": "nystrom-8", "vocab_size": 32, "max_position_embeddings": 64, "num_labels": 10}
    return NystromformerForMaskedTokens(lra_config(**fields | changes))


def question(*shape):
    ids = torch.randint(1, 32, shape, generator=torch.Generator().manual_seed(0))
    asked = torch.arange(shape[-1]).expand(shape) % 3 == 0
    return torch.where(asked, 0, ids), torch.where(asked, ids, -100)


def test_the_loss_is_the_mean_over_masked_tokens_and_answers_are_counted_by_example():
    model = build().eval()
    ids, labels = question(4, 30)
    labels[1, 9:] = -100
    out = model(ids, labels=labels)
    logits = model.decoder(model.nystromformer(ids).last_hidden_state)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert out.masked.tolist() == [10, 3, 10, 10]
    assert out.correct.tolist() == (logits.argmax(dim=-1) == labels).sum(dim=1).tolist()


def test_pairs_are_told_one_by_one():
    model = build(pair=True).eval()
    ids, labels = question(3, 2, 30)
    pairs, flat = model(ids, labels=labels), model(ids.flatten(0, 1), labels=labels.flatten(0, 1))
    torch.testing.assert_close(pairs.loss, flat.loss)
    assert pairs.masked.tolist() == [20, 20, 20]


def test_a_batch_in_which_nothing_is_masked_teaches_nothing():
    model = build().train()
    out = model(torch.ones(2, 20, dtype=torch.long), labels=torch.full((2, 20), -100))
    out.loss.backward()
    assert out.loss == 0
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def test_labels_are_needed():
    with pytest.raises(ValueError, match=r"labels: none given; must be \(2, 20\) like input_ids"):
        build()(torch.ones(2, 20, dtype=torch.long))


def test_a_classifier_takes_the_encoder_over(tmp_path):
    model = build(positions="rotary")
    model.save_pretrained(tmp_path)
    classifier = NystromformerForLongRangeArena.from_pretrained(tmp_path)
    for name, parameter in classifier.nystromformer.named_parameters():
        assert torch.equal(parameter, model.nystromformer.get_parameter(name))
