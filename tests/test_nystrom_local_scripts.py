"""The measurements of `nystrom-local` run, and say what they should where the answer is known."""

import json
import random

import pytest
import torch
from small_articles import WORDS, run_script, write_articles, write_model


@pytest.fixture
def files(tmp_path):
    """A small model, and eight articles with room for three passages of 100 tokens each."""
    write_model(tmp_path / "model")
    draw = random.Random(0)
    write_articles(tmp_path / "data", [" ".join(draw.choices(WORDS, k=400)) for _ in range(8)])
    return ["--model", tmp_path / "model", "--data", tmp_path / "data"]


def records_of(folder):
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


@pytest.fixture
def retrieve(files, tmp_path, monkeypatch):
    def call(out, *arguments):
        common = [*files, "--out", tmp_path / out, "--cache", tmp_path / "cache", "--length", 100]
        names = run_script(monkeypatch, "retrieval_agreement.py", *common, *arguments)
        return tmp_path / out, names

    return call


def test_retrieval_compares_with_exact_attention_on_articles_behind_the_skipped(retrieve):
    out, _ = retrieve("out", "--passages", 15, "--skip", 3)
    assert {path.name for path in out.iterdir()} == {"config.json", "records.jsonl", "table.md"}
    records = records_of(out)
    assert {r["attention"] for r in records}.isdisjoint({"exact"})
    assert {r["config"]["passages"] for r in records} == {15}
    for record in records:
        low, high = (-1e-6, 1) if record["metric"] == "similarity_lost" else (0, 1 + 1e-6)
        assert low <= record["value"] <= high, record["metric"]


def test_retrieval_goes_on_with_the_embeddings_that_it_has(retrieve, monkeypatch):
    first, _ = retrieve("first", "--passages", 12, "--skip", 0)
    with monkeypatch.context() as patch:
        patch.setattr("nystromformer.integrations.probe._current", None)  # any embedding would fail
        second, _ = retrieve("second", "--passages", 12, "--skip", 0)
    assert (first / "table.md").read_text() == (second / "table.md").read_text()


def test_retrieval_measures_only_what_its_folder_lacks_and_refuses_other_passages(retrieve, capsys):
    chosen, plain = "nystrom-local-64, 3 chosen", "nystrom-local-64"
    out, _ = retrieve("out", "--passages", 12, "--skip", 0, "--only", chosen)
    first = records_of(out)
    retrieve("out", "--passages", 12, "--skip", 0, "--only", chosen, plain)
    assert records_of(out)[: len(first)] == first
    assert {r["attention"] for r in records_of(out)[len(first) :]} == {plain}
    assert (out / "table.md").read_text().index(f"| {plain} |") < (out / "table.md").read_text().index(chosen)
    with pytest.raises(SystemExit):
        retrieve("out", "--passages", 9, "--skip", 0)
    assert "holds records of other passages" in capsys.readouterr().err


def test_retrieval_says_when_there_are_too_few_articles(retrieve, capsys):
    with pytest.raises(SystemExit):
        retrieve("out", "--passages", 16, "--skip", 3)
    assert "--passages 16: the articles have just 15" in capsys.readouterr().err


def test_agreement_counts_neighbors_and_leaves_out_the_excluded(retrieve):
    _, names = retrieve("out", "--passages", 12, "--skip", 0)
    angles = torch.linspace(0, 1.5, 14)
    angles[1] = 0.01  # the nearest of all to 0, and to nothing else
    points = torch.stack((angles.cos(), angles.sin()), dim=1)
    itself = torch.eye(14, dtype=torch.bool)
    assert names["agreement"](points, points, itself) == names["Agreement"](top_1=1, top_10=1, loss=0)
    moved = points.clone()
    moved[1] = -points[1]
    found = names["agreement"](moved, points, itself)
    assert found.top_1 < 1
    assert found.loss > 0
    without = itself.clone()
    without[1], without[:, 1] = True, True
    kept = torch.arange(14) != 1
    assert names["agreement"](moved[kept], points[kept], without[kept][:, kept]).top_1 == 1


def test_the_study_goes_on_where_it_stopped_and_draws_when_it_has_times(files, tmp_path, monkeypatch):
    out = tmp_path / "study"
    quality = ["quality", *files, "--out", out, "--articles", 2, "--of", "choosing"]
    run_script(monkeypatch, "nystrom_local_study.py", *quality, "--lengths", 80)
    before = records_of(out)
    values = {(r["metric"], r["setting"]): r["value"] for r in before}
    assert values["output_error", "nystrom-128"] < 1e-5 < values["output_error", "nystrom-32"]
    assert values["output_error", "block_size 64"] < 1e-5 < values["output_error", "block_size 8"]
    assert values["cosine", "num_landmarks 256"] > 1 - 1e-5
    run_script(monkeypatch, "nystrom_local_study.py", *quality, "--lengths", 80)
    assert records_of(out) == before
    assert not (out / "quality-time.png").exists()
    run_script(monkeypatch, "nystrom_local_study.py", "time", "--length", 128, "--budget", 0.1, "--out", out)
    assert "exact" in (out / "choosing.md").read_text()


def test_heads_get_blocks_where_these_take_away_most(files, tmp_path, monkeypatch):
    quality = ["quality", *files, "--out", tmp_path / "study", "--articles", 2, "--of", "choosing", "--lengths", 80]
    names = run_script(monkeypatch, "nystrom_local_study.py", *quality, "--only", "defaults")
    numbers = torch.tensor(names["BLOCKS_OF_HEADS"])
    errors = torch.stack([torch.full((1, 2), 0.5) - torch.tensor([0.01, 0.05]) * n for n in numbers])
    given = numbers[names["numbers_by_head"](errors, 3)]
    assert given.tolist() == [[0, 6]], "all to the head that gains five times as much"
    flat = torch.full((len(numbers), 1, 2), 0.5)
    assert numbers[names["numbers_by_head"](flat, 3)].tolist() == [[0, 0]], "none where they take nothing away"
