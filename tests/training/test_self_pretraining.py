"""`nystromformer lra --self-pretrain`: two runs in one folder, resumed exactly."""

import pytest
import torch
from safetensors.torch import load_file
from training_runs import Killed

from nystromformer.records import read_records
from nystromformer.training.self_pretraining import FOLDER, MaskedTrainer
from nystromformer.training.trainer import ExactTrainer


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def told(folder):
    return [(record["metric"], record["step"], record["value"]) for record in read_records(folder)]


def test_both_parts_leave_records_and_a_model_and_the_result_tells_the_budget(self_pretrained):
    first = list(read_records(self_pretrained / FOLDER))
    assert {record["job"] for record in first} == {"self-pretrain"}
    assert {"train_loss", "dev_loss", "dev_masked_accuracy", "masked_accuracy"} == {each["metric"] for each in first}
    assert first[-1]["config"]["masked"] == 0.15
    result = list(read_records(self_pretrained))[-1]
    assert result["config"]["self_pretrain"] == 6
    budget = {name: first[-1][name] for name in ("step", "examples_seen", "tokens")}
    assert result["pretraining"] == budget | {"masked_accuracy": first[-1]["value"]}
    assert budget["examples_seen"] == 24
    assert result["tokens"] > 0
    assert result["tokens_per_second"] > 0
    table = (self_pretrained / "table.md").read_text()
    assert "| nystrom-8 (self-pretrained) |" in table
    assert "self-pretraining: 6 steps, 24 examples" in table
    assert "Training speed: tokens per second" in table


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
def test_wherever_it_is_killed_it_ends_the_same(call, self_pretrained, lra, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(ExactTrainer, "training_step", killed_at(call, ExactTrainer.training_step))
        with pytest.raises(Killed):
            lra(out, "--self-pretrain", "6")
    assert lra(out, "--self-pretrain", "6") == 2, "only with --resume"
    assert lra(out, "--self-pretrain", "6", "--resume") == 0
    for inner in (".", FOLDER):
        expected, found = weights(self_pretrained / inner), weights(out / inner)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        assert told(out / inner) == told(self_pretrained / inner)


@pytest.mark.slow
def test_masks_are_others_in_each_epoch(monkeypatch, lra, tmp_path):
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
