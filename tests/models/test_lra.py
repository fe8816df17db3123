"""The Long Range Arena classifier: the paper's sizes, pairs, pooling. The model of self-pretraining: what it is asked,
and that a classifier takes its encoder over."""

import pytest
import torch

from nystromformer.models.lra import (
    LongRangeArenaConfig,
    NystromformerForLongRangeArena,
    NystromformerForMaskedTokens,
    lra_config,
)


def config(**changes):
    fields = {"attention": "nystrom-8", "vocab_size": 32, "max_position_embeddings": 64, "num_labels": 10}
    return lra_config(**fields | changes)


def build(**changes):
    torch.manual_seed(0)
    return NystromformerForLongRangeArena(config(**changes)).eval()


def test_the_model_has_the_papers_size():
    """ListOps at 2,048: embeddings, two layers of width 64 with two kernels of 35, and the head 64 → 128 → 10."""
    model = build(attention="nystrom-64", max_position_embeddings=2048)
    embeddings = (32 + 2048) * 64
    layer = 4 * (64 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64) + 2 * 2 * 64 + 2 * 35
    head = (64 * 128 + 128) + (128 * 10 + 10)
    assert model.num_parameters() == embeddings + 2 * layer + 2 * 64 + head


def test_padding_does_not_change_the_answer():
    model, ids = build(), torch.randint(1, 32, (1, 40))
    padded = torch.nn.functional.pad(ids, (0, 13))
    torch.testing.assert_close(model(ids).logits, model(padded, attention_mask=padded != 0).logits)


def test_the_release_divides_by_the_padded_length():
    right, released, ids = build(), build(pooled_length=64), torch.randint(1, 32, (2, 16))
    expected = right.pooled(ids, None) * 16 / 64
    torch.testing.assert_close(released.pooled(ids, None), expected)
    mask = torch.arange(16).expand(2, 16) < torch.tensor([[16], [4]])
    expected = right.pooled(ids, mask) * torch.tensor([[16 / 64], [4 / 64]])
    torch.testing.assert_close(released.pooled(ids, mask), expected)


def test_pairs_share_the_encoder_and_are_compared():
    model, ids = build(pair=True, num_labels=2), torch.randint(1, 32, (3, 2, 20))
    first, second = (model.pooled(ids[:, side], None) for side in (0, 1))
    features = torch.cat((first, second, first * second, first - second), dim=1)
    expected = model.out_proj(torch.relu(model.dense(features)))
    torch.testing.assert_close(model(ids).logits, expected)


def test_the_loss_is_the_mean_cross_entropy():
    model, ids, labels = build(), torch.randint(1, 32, (4, 20)), torch.tensor([0, 3, 9, 1])
    out = model(ids, labels=labels)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))


def test_a_saved_model_loads(tmp_path):
    model, ids = build(pair=True, pooled_length=64), torch.randint(1, 32, (3, 2, 20))
    model.save_pretrained(tmp_path)
    loaded = NystromformerForLongRangeArena.from_pretrained(tmp_path).eval()
    assert isinstance(loaded.config, LongRangeArenaConfig)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("pair, shape", [(False, (2, 2, 20)), (True, (2, 20)), (True, (2, 3, 20))])
def test_input_of_the_wrong_form_is_refused(pair, shape):
    with pytest.raises(ValueError, match=f"must be .*, since pair={pair}"):
        build(pair=pair)(torch.ones(shape, dtype=torch.long))


def alike(table, first, second):
    """The cosine of two rows."""
    return torch.cosine_similarity(table[first], table[second], dim=0).item()


def test_near_gray_levels_and_pixels_begin_alike():
    fields = {"vocab_size": 257, "max_position_embeddings": 1024, "num_labels": 2}
    model, other = build(embedding_start="picture", **fields), build(**fields)
    tables = model.nystromformer.embeddings
    levels, pixels = tables.word_embeddings.weight, tables.position_embeddings.weight
    assert alike(levels, 100, 102) > 0.98 > 0.8 > alike(levels, 100, 160)
    assert not levels[0].any()  # a masked pixel is no level of gray
    middle = 16 * 32 + 16
    right, below, far = (alike(pixels, middle, middle + step) for step in (1, 32, 8))
    assert right == pytest.approx(below, abs=1e-5)
    assert right > 0.8 > far
    assert alike(pixels, 31, 32) < 0.8  # the end of a row and the next one's beginning are far apart
    for name, parameter in model.state_dict().items():
        assert parameter.shape == other.state_dict()[name].shape
        if "embeddings" in name:  # as large as random ones
            torch.testing.assert_close(parameter.std(), other.state_dict()[name].std(), rtol=0.1, atol=0)


def test_what_was_learned_is_not_overwritten_by_a_start(tmp_path):
    model, ids = build(embedding_start="picture", normalize_pooled=True), torch.randint(1, 32, (5, 64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.train()(ids)
    model.save_pretrained(tmp_path)
    loaded = NystromformerForLongRangeArena.from_pretrained(tmp_path).eval()
    assert float(model.norm.running_mean.abs().max()) > 0
    assert torch.equal(loaded(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("pair", [False, True])
def test_pooled_vectors_are_normalized_over_the_batch(pair):
    """Training sees what is left when all examples of a batch get something in common; evaluation sees each alone."""
    model = build(normalize_pooled=True, hidden_dropout_prob=0.0, pair=pair).double()
    ids = torch.randint(1, 32, (6, 2, 20) if pair else (6, 20))
    pooled = model.pooled(ids.flatten(0, -2), None)
    normal = (pooled - pooled.mean(dim=0)) / (pooled.var(dim=0, correction=0) + model.norm.eps).sqrt()
    torch.testing.assert_close(model.train().norm(pooled), normal)
    model.norm.eps = 1e-12  # beside deviations of some hundredths
    torch.testing.assert_close(model.norm(3 * pooled + 5), model.norm(pooled))
    model(ids, labels=torch.zeros(6, dtype=torch.long)).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.dense.parameters())
    model.eval()
    torch.testing.assert_close(model(ids[:1]).logits, model(ids).logits[:1])
    if not pair:
        torch.testing.assert_close(model.train()(ids[:1]).logits, model.eval()(ids[:1]).logits)  # one has no deviation


def test_a_senseless_length_is_refused():
    with pytest.raises(ValueError, match="pooled_length=0: must be at least 1"):
        build(pooled_length=0)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"embedding_start": "pictures"}, "must be one of 'random', 'picture'. Did you mean 'picture'"),
        (
            {"embedding_start": "picture", "max_position_embeddings": 2048},
            "2048 positions from 0 on: must be those of a square",
        ),
        ({"embedding_start": "picture", "position_offset": 2}, "64 positions from 2 on: must be"),
        ({"embedding_start": "picture", "hidden_size": 66}, "hidden_size=66: must be divisible by 4"),
    ],
)
def test_a_senseless_start_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        build(**fields)


def build_masked(**changes):
    torch.manual_seed(0)
    return NystromformerForMaskedTokens(config(**changes))


def question(*shape):
    ids = torch.randint(1, 32, shape, generator=torch.Generator().manual_seed(0))
    asked = torch.arange(shape[-1]).expand(shape) % 3 == 0
    return torch.where(asked, 0, ids), torch.where(asked, ids, -100)


def test_the_loss_is_the_mean_over_masked_tokens_and_answers_are_counted_by_example():
    model = build_masked().eval()
    ids, labels = question(4, 30)
    labels[1, 9:] = -100
    out = model(ids, labels=labels)
    logits = model.decoder(model.nystromformer(ids).last_hidden_state)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    assert out.masked.tolist() == [10, 3, 10, 10]
    assert out.correct.tolist() == (logits.argmax(dim=-1) == labels).sum(dim=1).tolist()


def test_pairs_are_told_one_by_one():
    model = build_masked(pair=True).eval()
    ids, labels = question(3, 2, 30)
    pairs, flat = model(ids, labels=labels), model(ids.flatten(0, 1), labels=labels.flatten(0, 1))
    torch.testing.assert_close(pairs.loss, flat.loss)
    assert pairs.masked.tolist() == [20, 20, 20]


def test_a_batch_in_which_nothing_is_masked_teaches_nothing():
    model = build_masked().train()
    out = model(torch.ones(2, 20, dtype=torch.long), labels=torch.full((2, 20), -100))
    out.loss.backward()
    assert out.loss == 0
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def test_labels_are_needed():
    with pytest.raises(ValueError, match=r"labels: none given; must be \(2, 20\) like input_ids"):
        build_masked()(torch.ones(2, 20, dtype=torch.long))


def test_a_classifier_takes_the_encoder_over(tmp_path):
    model = build_masked(positions="rotary")
    model.save_pretrained(tmp_path)
    classifier = NystromformerForLongRangeArena.from_pretrained(tmp_path)
    for name, parameter in classifier.nystromformer.named_parameters():
        assert torch.equal(parameter, model.nystromformer.get_parameter(name))


def test_masked_tokens_are_first_guessed_by_their_frequency():
    """The loss then begins at the entropy of the frequencies, where a vector has nothing in common to learn."""
    torch.manual_seed(0)
    model = NystromformerForMaskedTokens(config()).eval()
    frequencies = torch.softmax(3 * torch.randn(32), 0)
    model.start_at(frequencies)
    ids = torch.multinomial(frequencies, 40 * 64, replacement=True).reshape(40, 64)
    with torch.no_grad():
        loss = model(torch.where(torch.arange(64) % 2 == 0, 0, ids), labels=ids).loss
    entropy = -(frequencies * frequencies.log()).sum()
    assert entropy < 0.7 * torch.tensor(32.0).log()
    assert abs(loss - entropy) < 0.3
