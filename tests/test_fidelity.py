"""The fidelity study runs, and says what it should where the answer is known."""

import json
import runpy
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from encoders import build
from transformers import BertTokenizerFast

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "fidelity.py"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "birds"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the script on a small model and short articles; gives its folder of results."""
    model, data = tmp_path / "model", tmp_path / "data"
    data.mkdir()
    build("bert").save_pretrained(model)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt"), model_max_length=512).save_pretrained(model)
    texts = [" ".join((WORDS * 8)[start:]) for start in range(4)] + ["too short"]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), data / "articles.parquet")

    def call(*arguments):
        common = ["--model", str(model), "--data", str(data), "--out", str(tmp_path / "out"), "--lengths", "24", "60"]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *common, *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        return tmp_path / "out"

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
    assert "has just 4 of 24 tokens and more" in capsys.readouterr().err
