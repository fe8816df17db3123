"""Pretraining: a killed run ends with the weights of a whole one; each objective is divided by its own count."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpora import texts, write_json_lines, write_vocabulary
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM, BertModel

from nystromformer.data.corpus.examples import pretraining_examples
from nystromformer.data.corpus.shards import build_corpus
from nystromformer.data.corpus.text import Reading
from nystromformer.data.tokenizers import load_tokenizer
from nystromformer.models import NystromformerForPreTraining
from nystromformer.records import read_records
from nystromformer.training import SIZES
from nystromformer.training.pretraining import Pretraining, build_model, run_pretraining, special_tokens
from nystromformer.training.run import last_checkpoint
from nystromformer.training.shared.callbacks import Clock
from nystromformer.training.shared.recipes import PretrainingRecipe, pretraining_recipe

RECIPE = pretraining_recipe("smoke").changed(
    steps=14, batch_size=8, micro_batch=4, save_every=3, eval_every=5, max_length=32
)
"""An epoch of the small corpus has 9 steps."""


class Killed(Exception):
    pass


@pytest.fixture(scope="module", autouse=True)
def tiny():
    """A model that trains in no time."""
    before = SIZES["tiny"]
    SIZES["tiny"] = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    yield
    SIZES["tiny"] = before


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """(tokenizer, corpus)"""
    folder = tmp_path_factory.mktemp("corpus")
    tokenizer = load_tokenizer(str(write_vocabulary(folder)))
    file = write_json_lines(folder / "a.jsonl", texts(60))
    content = tokenizer.backend_tokenizer.to_str()
    return tokenizer, build_corpus([file], Reading(), content, folder / "cache", workers=1)


def run(material, out: Path, recipe: PretrainingRecipe = RECIPE, *, resume: bool = False, **settings: object):
    tokenizer, corpus = material
    training = Pretraining(
        preset="smoke",
        recipe=recipe,
        attention="nystrom-8",
        source=None,
        seed=3,
        validation_share=0.2,
        settings={"dataloader_num_workers": 0} | settings,
        dtype="float32",
    )
    special = special_tokens(tokenizer)
    model = build_model(recipe, "nystrom-8", None, special, seed=3)
    train, validation = pretraining_examples(corpus, special, max_length=recipe.max_length, seed=3)
    arguments = training.arguments(out, "cpu")
    return run_pretraining(training, model, tokenizer, train, validation, out, arguments, resume=resume)


def kill_at(step: int | None):
    """A clock that stops the run like a signal, after some step."""

    def on_step_end(self, args, state, control, **kwargs):
        Clock_on_step_end(self, args, state, control, **kwargs)
        if state.global_step == step:
            raise Killed

    return on_step_end


Clock_on_step_end = Clock.on_step_end


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(material, tmp_path_factory):
    """A run that was never interrupted."""
    out = tmp_path_factory.mktemp("whole")
    return out, run(material, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps, workers",
    [((5,), 0), ((2, 9, 13), 2)],  # within an epoch; before the first checkpoint, at an epoch's end, in the second one
    ids=["once", "three-times-with-workers"],
)
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(material, whole, tmp_path, monkeypatch, steps, workers):
    for number, step in enumerate(steps):
        monkeypatch.setattr(Clock, "on_step_end", kill_at(step))
        with pytest.raises(Killed):
            run(material, tmp_path, resume=number > 0, dataloader_num_workers=workers)
    monkeypatch.setattr(Clock, "on_step_end", Clock_on_step_end)
    record = run(material, tmp_path, resume=True, dataloader_num_workers=workers)
    expected, found = weights(whole[0]), weights(tmp_path)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    for name in ("value", "sop_accuracy", "tokens", "step"):
        assert record[name] == whole[1][name]


@pytest.mark.slow
def test_records_of_a_resumed_run_are_those_of_one_run(material, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(Clock, "on_step_end", kill_at(11))  # after the evaluation of step 10 and the checkpoint of 9
    with pytest.raises(Killed):
        run(material, tmp_path)
    monkeypatch.setattr(Clock, "on_step_end", Clock_on_step_end)
    run(material, tmp_path, resume=True)
    series = [
        [(r["metric"], r["step"], r["value"]) for r in read_records(out) if r["metric"] != "tokens_per_second"]
        for out in (whole[0], tmp_path)
    ]
    assert series[0] == series[1]
    evaluations = [r for r in read_records(tmp_path) if r["metric"] == "dev_mlm_accuracy"]
    assert [r["step"] for r in evaluations] == [5, 10, 14], "the last step is evaluated, too"
    assert [r["seconds"] for r in evaluations] == sorted(r["seconds"] for r in evaluations)
    assert [r["tokens"] for r in evaluations] == sorted(r["tokens"] for r in evaluations)
    assert any(r["metric"] == "tokens_per_second" and r["value"] > 0 for r in read_records(tmp_path))


@pytest.mark.slow
def test_a_run_killed_before_it_was_finished_only_finishes(material, whole, tmp_path, monkeypatch):
    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("nystromformer.training.run.keep_model", killed)
        with pytest.raises(Killed):
            run(material, tmp_path)
    assert last_checkpoint(tmp_path).name == "checkpoint-14"
    record = run(material, tmp_path, resume=True)
    assert record["value"] == whole[1]["value"]
    assert record["seconds"] > 0
    assert all(torch.equal(tensor, weights(tmp_path)[name]) for name, tensor in weights(whole[0]).items())
    assert run(material, tmp_path, resume=True) == record, "a finished run is left alone"


@pytest.mark.slow
def test_micro_batches_change_nothing(material, tmp_path):
    """Their numbers of masked tokens and of pairs differ, so that any common divisor would show."""
    recipe = replace(RECIPE, steps=3, eval_every=3, dropout=0.0)
    run(material, tmp_path / "one", replace(recipe, micro_batch=8), optim="sgd", learning_rate=0.5)
    run(material, tmp_path / "many", replace(recipe, micro_batch=1), optim="sgd", learning_rate=0.5)
    one, many = weights(tmp_path / "one"), weights(tmp_path / "many")
    assert max(float((one[name] - many[name]).abs().max()) for name in one) < 1e-5
    start = build_model(recipe, "nystrom-8", None, special_tokens(material[0]), seed=3).state_dict()
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 1e-3


@pytest.fixture
def trainer(material, tmp_path, monkeypatch):
    """The trainer of a run that stops before its first step."""
    made = []

    def stop(trainer):
        made.append(trainer)
        raise Killed

    monkeypatch.setattr("nystromformer.training.run.train", stop)
    with pytest.raises(Killed):
        run(material, tmp_path)
    return made[0]


def test_each_epoch_masks_anew_and_the_same_again(trainer):
    def epoch(number):
        loader = trainer.get_train_dataloader()
        trainer.order.set_epoch(number)
        return [batch["labels"] for batch in loader]

    first, second, again = epoch(0), epoch(1), epoch(0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_evaluation_is_exact_whatever_the_batches(trainer):
    examples, model = trainer.eval_dataset, trainer.model.eval()
    with torch.no_grad():
        out = model(**examples.batch(range(len(examples))))
    expected = {
        "eval_mlm_accuracy": out.mlm_correct / out.mlm_count,
        "eval_sop_accuracy": out.sop_correct / out.sop_count,
        "eval_loss": out.mlm_loss_sum / out.mlm_count + out.sop_loss_sum / out.sop_count,
    }
    for size in (1, 3, 64):
        trainer.args.per_device_eval_batch_size = size
        metrics = trainer.evaluate()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(float(value), rel=1e-5)


def test_a_lone_process_with_nothing_left_adds_nothing(trainer, monkeypatch):
    """As the second of two processes with an odd number of examples."""
    trainer.eval_dataset = trainer.eval_dataset.some(7)
    alone, sums = trainer.evaluate(), []

    def reduce(tensor, reduction):
        sums.append(tensor)
        return tensor

    for rank in (0, 1):
        monkeypatch.setattr(type(trainer.args), "process_index", rank, raising=False)
        monkeypatch.setattr(type(trainer.args), "world_size", 2, raising=False)
        monkeypatch.setattr(trainer.accelerator, "reduce", reduce)
        trainer.args.per_device_eval_batch_size = 1
        trainer.evaluation_loop(trainer.get_eval_dataloader(), "")
    total = sum(sums)
    assert float(total[2] / total[1]) == pytest.approx(alone["eval_mlm_accuracy"])


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM], ids=["encoder", "masked-lm"])
def test_starting_from_a_standard_model_keeps_its_weights(material, tmp_path, kind):
    special = special_tokens(material[0])
    torch.manual_seed(0)
    bert = kind(BertConfig(vocab_size=22, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                           intermediate_size=32, max_position_embeddings=40, pad_token_id=0))  # fmt: skip
    bert.save_pretrained(tmp_path)
    model = build_model(RECIPE, "nystrom-64", str(tmp_path), special, seed=0).eval()
    assert isinstance(model, NystromformerForPreTraining)
    ids = torch.randint(5, 22, (2, 30))
    theirs = bert.eval()(ids, output_hidden_states=True)
    ours = model(ids, output_hidden_states=True)
    torch.testing.assert_close(ours.hidden_states[-1], theirs.hidden_states[-1], atol=1e-5, rtol=0)
    if kind is BertForMaskedLM:
        torch.testing.assert_close(ours.prediction_logits, theirs.logits, atol=1e-5, rtol=0)
    again = build_model(RECIPE, "nystrom-64", str(tmp_path), special, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"--max-length 64: .* has positions for 40 tokens; lengthen it with"):
        build_model(replace(RECIPE, max_length=64), "nystrom-64", str(tmp_path), special, seed=0)
    with pytest.raises(ValueError, match="has 99 tokens, but .* has embeddings for 22; leave --tokenizer out"):
        build_model(RECIPE, "nystrom-64", str(tmp_path), replace(special, vocab_size=99), seed=0)


def test_a_model_without_token_types_is_told_of_none(material):
    tokenizer, corpus = material
    train, _ = pretraining_examples(corpus, special_tokens(tokenizer), max_length=32, seed=0, token_types=False)
    assert "token_type_ids" not in train.batch([0, 1])
