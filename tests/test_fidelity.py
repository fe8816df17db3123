"""The fidelity study runs, and says what it should where the answer is known."""

import json

import pytest
from small_articles import WORDS, run_script, write_articles, write_model


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the script on a small model and short articles; gives its folder of results."""
    model, data, out = tmp_path / "model", tmp_path / "data", tmp_path / "out"
    write_model(model)
    write_articles(data, [" ".join((WORDS * 8)[start:]) for start in range(4)] + ["too short"])

    def call(*arguments):
        common = ["--model", model, "--data", data, "--out", out, "--lengths", 24, 60]
        run_script(monkeypatch, "fidelity.py", *common, *arguments)
        return out

    return call


def test_what_meets_all_tokens_is_exact_and_what_ignores_them_is_not(run):
    out = run("--articles", "3")
    assert {path.name for path in out.iterdir()} == {"config.json", "records.jsonl", "table.md", "cosine.png"}
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    errors = {(r["attention"], r["length"]): r["value"] for r in records if r["metric"] == "output_error"}
    for exact in ("nystrom-64", "nystrom-256", "nystrom-local-128", "longformer-129", "longformer-257"):
        assert errors[exact, 60] < 1e-5, exact
    assert errors["nystrom-32", 24] < 1e-5
    assert errors["nystrom-64", 60] < errors["nystrom-32", 60] < errors["nystrom-16", 60] < errors["mean of values", 60]
    cosines = {(r["attention"], r["length"]): (r["worst"], r["value"]) for r in records if r["metric"] == "cosine"}
    assert cosines["nystrom-256", 60][0] > 1 - 1e-5
    assert all(worst <= mean + 1e-6 for worst, mean in cosines.values())


def test_too_few_articles_are_refused(run, capsys):
    with pytest.raises(SystemExit):
        run("--articles", "9")
    assert "there are just 4 of 24 tokens and more" in capsys.readouterr().err
