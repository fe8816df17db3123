"""`nystromformer lra --self-pretrain`: two runs in one folder, resumed exactly, and shared among seeds."""

import json

import pytest
import torch
from safetensors.torch import load_file
from training_runs import Killed

from nystromformer.cli import main
from nystromformer.data.lra.listops import ListOpsOptions, generate
from nystromformer.records import read_records
from nystromformer.training.self_pretraining import FOLDER, MaskedTrainer
from nystromformer.training.trainer import ExactTrainer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "listops"
    generate(folder, ListOpsOptions(min_tokens=16, max_tokens=64, train=24, dev=6, test=10), workers=1)
    return folder


@pytest.fixture(scope="module")
def lra(data):
    def run(out, *more):
        given = ("listops", "--preset", "smoke", "--attention", "nystrom-8", "--data", data, "--out", out, *more)
        return main(["lra", *map(str, given)])

    return run


@pytest.fixture(scope="module")
def whole(lra, tmp_path_factory):
    """A run to the end."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert lra(out, "--self-pretrain", "6") == 0
    return out


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def told(folder):
    return [(record["metric"], record["step"], record["value"]) for record in read_records(folder)]


def test_both_parts_leave_records_and_a_model_and_the_result_tells_the_budget(whole):
    first = list(read_records(whole / FOLDER))
    assert {record["job"] for record in first} == {"self-pretrain"}
    assert {"train_loss", "dev_loss", "dev_masked_accuracy", "masked_accuracy"} == {each["metric"] for each in first}
    assert first[-1]["config"]["masked"] == 0.15
    result = list(read_records(whole))[-1]
    assert result["config"]["self_pretrain"] == 6
    budget = {name: first[-1][name] for name in ("step", "examples_seen", "tokens")}
    assert result["pretraining"] == budget | {"masked_accuracy": first[-1]["value"]}
    assert budget["examples_seen"] == 24
    assert result["tokens"] > 0
    assert result["tokens_per_second"] > 0
    table = (whole / "table.md").read_text()
    assert "| nystrom-8 (self-pretrained) |" in table
    assert "self-pretraining: 6 steps, 24 examples" in table
    assert "Training speed: tokens per second" in table


@pytest.mark.slow
def test_training_starts_from_the_pretrained_encoder(whole, lra, tmp_path):
    """With a learning rate of nothing, the classifier's encoder stays what it started as."""
    assert lra(tmp_path / "run", "--from", whole, "--set", "learning_rate=0") == 0
    before, after = weights(whole / FOLDER), weights(tmp_path / "run")
    encoder = [name for name in after if name.startswith("nystromformer.")]
    assert encoder
    assert all(torch.equal(before[name], after[name]) for name in encoder)
    assert not (tmp_path / "run" / FOLDER).exists()


def killed_at(call, step):
    calls = []

    def training_step(self, *arguments, **keywords):
        calls.append(1)
        if len(calls) == call:
            raise Killed
        return step(self, *arguments, **keywords)

    return training_step


@pytest.mark.slow
@pytest.mark.parametrize("call", [5, 7, 9], ids=["while pretraining", "before training", "while training"])
def test_wherever_it_is_killed_it_ends_the_same(call, whole, lra, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(ExactTrainer, "training_step", killed_at(call, ExactTrainer.training_step))
        with pytest.raises(Killed):
            lra(out, "--self-pretrain", "6")
    assert lra(out, "--self-pretrain", "6") == 2, "only with --resume"
    assert lra(out, "--self-pretrain", "6", "--resume") == 0
    for inner in (".", FOLDER):
        expected, found = weights(whole / inner), weights(out / inner)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert told(out / inner) == told(whole / inner)


@pytest.mark.slow
def test_masks_are_others_in_each_epoch(whole, data, monkeypatch, lra, tmp_path):
    seen = []

    def training_step(self, model, inputs, *arguments, **keywords):
        if isinstance(self, MaskedTrainer):
            seen.append(inputs["labels"])
        return original(self, model, inputs, *arguments, **keywords)

    original = ExactTrainer.training_step
    monkeypatch.setattr(ExactTrainer, "training_step", training_step)
    assert lra(tmp_path / "run", "--self-pretrain", "2", "--batch-size", "16") == 0  # all of them, in each epoch
    first, second = ({tuple(row[row != -100].tolist()) for row in labels} for labels in seen)
    assert first != second


@pytest.mark.slow
def test_seeds_share_one_pretraining(whole, lra, tmp_path):
    assert lra(tmp_path / "seeds", "--from", whole, "--seeds", "1,2") == 0
    found = [json.loads((path / "config.json").read_text())["pretrained"] for path in tmp_path.glob("seeds/*/*/seed-*")]
    assert len(found) == 2
    assert len(set(found)) == 1
    assert (
        "10 | 128 | self-pretraining: 6 steps, 24 examples | nystrom-8 (self-pretrained) | 1, 2 |"
        in (tmp_path / "seeds" / "table.md").read_text()
    )


REFUSED = {
    "another attention": (["--attention", "standard"], "pretrained with attention='nystrom-8', but this run has"),
    "another encoder": (["--positions", "rotary"], "positions=None, but this run has positions='rotary'"),
    "both": (["--self-pretrain", "3"], "the run has been pretrained already; give one of them"),
    "a token that is no padding": (["--legacy-padding-id"], "the id of padding stands for masked tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(name, whole, lra, tmp_path, capsys):
    options, message = REFUSED[name]
    assert lra(tmp_path / "run", "--from", whole, *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_only_a_finished_self_pretraining_on_the_same_data_is_shared(whole, lra, tmp_path, capsys):
    assert lra(tmp_path / "run", "--from", tmp_path) == 2
    assert "holds no self-pretraining; give a run made with --self-pretrain STEPS" in capsys.readouterr().err
    generate(tmp_path / "other", ListOpsOptions(min_tokens=16, max_tokens=64, train=24, dev=6, test=10, seed=5))
    assert lra(tmp_path / "run", "--from", whole, "--data", tmp_path / "other") == 2
    assert "pretrained on other data" in capsys.readouterr().err
    records = tmp_path / "begun" / FOLDER / "records.jsonl"
    records.parent.mkdir(parents=True)
    records.write_text("".join((whole / FOLDER / "records.jsonl").read_text().splitlines(keepends=True)[:-1]))
    records.with_name("config.json").write_text((whole / FOLDER / "config.json").read_text())
    assert lra(tmp_path / "run", "--from", tmp_path / "begun") == 2
    assert "its self-pretraining is not finished; train it to its end with --resume" in capsys.readouterr().err
