"""`nystromformer lra --from` and `--after`: weights of another run to start from, and what is refused as such."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from nystromformer.data.lra.listops import ListOpsOptions, generate
from nystromformer.records import read_records
from nystromformer.training.self_pretraining import FOLDER


@pytest.fixture(scope="module")
def other_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other") / "listops"
    generate(folder, ListOpsOptions(min_tokens=16, max_tokens=64, train=24, dev=6, test=10, seed=5), workers=1)
    return folder


@pytest.fixture(scope="module")
def continued(self_pretrained, lra, other_data, tmp_path_factory):
    """A run on other data, after one on the first data that was self-pretrained."""
    out = tmp_path_factory.mktemp("continued") / "run"
    assert lra(out, "--after", self_pretrained, "--data", other_data) == 0
    return out


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def result_of(folder):
    return list(read_records(folder))[-1]


@pytest.mark.slow
def test_training_starts_from_the_pretrained_encoder(self_pretrained, lra, tmp_path):
    """With a learning rate of nothing, the classifier's encoder stays what it started as."""
    assert lra(tmp_path / "run", "--from", self_pretrained, "--set", "learning_rate=0") == 0
    before, after = weights(self_pretrained / FOLDER), weights(tmp_path / "run")
    encoder = [name for name in after if name.startswith("nystromformer.")]
    assert encoder
    assert all(torch.equal(before[name], after[name]) for name in encoder)
    assert not (tmp_path / "run" / FOLDER).exists()


@pytest.mark.slow
def test_seeds_share_one_pretraining(self_pretrained, lra, tmp_path):
    assert lra(tmp_path / "seeds", "--from", self_pretrained, "--seeds", "1,2") == 0
    found = [json.loads((path / "config.json").read_text())["pretrained"] for path in tmp_path.glob("seeds/*/*/seed-*")]
    assert len(found) == 2
    assert len(set(found)) == 1
    assert (
        "10 | 128 | 16 to 64 tokens, self-pretraining: 6 steps, 24 examples | nystrom-8 (self-pretrained) | 1, 2 |"
        in (tmp_path / "seeds" / "table.md").read_text()
    )


REFUSED = {
    "another attention": (["--attention", "standard"], "trained with attention='nystrom-8', but this run has"),
    "another encoder": (["--positions", "rotary"], "positions=None, but this run has positions='rotary'"),
    "two starts": (["--self-pretrain", "3"], "--from with --self-pretrain: a run has one start; give one of them"),
    "a token that is no padding": (["--legacy-padding-id"], "the id of padding stands for masked tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(name, self_pretrained, lra, tmp_path, capsys):
    options, message = REFUSED[name]
    assert lra(tmp_path / "run", "--from", self_pretrained, *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_only_a_finished_self_pretraining_on_the_same_data_is_shared(
    self_pretrained, lra, other_data, tmp_path, capsys
):
    assert lra(tmp_path / "run", "--from", tmp_path) == 2
    assert "holds no self-pretraining; give a run made with --self-pretrain STEPS" in capsys.readouterr().err
    assert lra(tmp_path / "run", "--from", self_pretrained, "--data", other_data) == 2
    assert "pretrained on other data" in capsys.readouterr().err
    records = tmp_path / "begun" / FOLDER / "records.jsonl"
    records.parent.mkdir(parents=True)
    records.write_text("".join((self_pretrained / FOLDER / "records.jsonl").read_text().splitlines(keepends=True)[:-1]))
    records.with_name("config.json").write_text((self_pretrained / FOLDER / "config.json").read_text())
    assert lra(tmp_path / "run", "--from", tmp_path / "begun") == 2
    assert "its self-pretraining is not finished; train it to its end with --resume" in capsys.readouterr().err


@pytest.mark.slow
def test_training_goes_on_from_the_whole_trained_model(self_pretrained, lra, other_data, tmp_path):
    """With a learning rate of nothing it stays what it was, the classifier included, on other data, too."""
    nothing = ("--set", "learning_rate=0", "--data", other_data)
    assert lra(tmp_path / "run", "--after", self_pretrained, *nothing) == 0
    before, after = weights(self_pretrained), weights(tmp_path / "run")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in after)


@pytest.mark.slow
def test_what_all_runs_before_cost_is_told(self_pretrained, continued, lra, tmp_path):
    first, second = result_of(self_pretrained), result_of(continued)
    assert second["pretraining"] == first["pretraining"]
    cost = {name: first[name] for name in ("step", "examples_seen", "tokens")}
    assert second["after"] == cost | {"accuracy": first["value"]}
    assert lra(tmp_path / "third", "--after", continued) == 0
    third = result_of(tmp_path / "third")
    assert third["after"]["step"] == first["step"] + second["step"]
    assert third["after"]["tokens"] == first["tokens"] + second["tokens"]
    assert third["after"]["accuracy"] == second["value"]
    table = (tmp_path / "third" / "table.md").read_text()
    assert "| nystrom-8 (continued) |" in table
    assert "self-pretraining: 6 steps, 24 examples, trained before: 8 steps, 32 examples" in table


UNFIT = {
    "another attention": (["--attention", "standard"], "trained with attention='nystrom-8', but this run has"),
    "another classifier": (["--normalize-pooled"], "normalize_pooled=None, but this run has normalize_pooled=True"),
    "another length": (["--max-length", "64"], "max_length=128, but this run has max_length=64"),
    "two starts": (["--self-pretrain", "3"], "--after with --self-pretrain: a run has one start; give one of them"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_another_model_than_the_one_trained_before_is_refused(name, self_pretrained, lra, tmp_path, capsys):
    options, message = UNFIT[name]
    assert lra(tmp_path / "run", "--after", self_pretrained, *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_only_a_whole_run_of_the_arena_can_be_trained_on(self_pretrained, lra, tmp_path, capsys):
    for folder in (tmp_path, self_pretrained / FOLDER):
        assert lra(tmp_path / "run", "--after", folder) == 2
        assert f"--after {folder}: holds no run of lra; give the folder of a single one." in capsys.readouterr().err
    records = tmp_path / "begun" / "records.jsonl"
    records.parent.mkdir()
    records.write_text("".join((self_pretrained / "records.jsonl").read_text().splitlines(keepends=True)[:-1]))
    records.with_name("config.json").write_text((self_pretrained / "config.json").read_text())
    assert lra(tmp_path / "run", "--after", tmp_path / "begun") == 2
    assert "its training is not finished; train it to its end with --resume" in capsys.readouterr().err


def test_a_result_that_does_not_tell_what_it_cost_is_refused(self_pretrained, lra, tmp_path, capsys):
    old = tmp_path / "old"
    shutil.copytree(self_pretrained, old)
    *before, result = (old / "records.jsonl").read_text().splitlines(keepends=True)
    (old / "records.jsonl").write_text("".join([*before, result.replace('"tokens":', '"letters":')]))
    assert lra(tmp_path / "run", "--after", old) == 2
    assert f"--after {old}: its result does not tell tokens; train it again." in capsys.readouterr().err
