"""`nystromformer demo`: a real one, made short by its own options and with a small model."""

import json
import re

import pytest
from small_bert import write_bert

from nystromformer.cli import main
from nystromformer.records import read_records

SHORT = ["demo", "--tokens", "512", "--lengths", "128", "--tiles", "500", "--steps", "2", "--seed", "5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("model"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "run"
    assert main([*SHORT, "--model", str(model), "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_all_parts_are_recorded_and_drawn(run):
    assert {path.name for path in run.iterdir()} == {
        "config.json", "records.jsonl", "efficiency", "attention-map", "slide.png", "figures", "report.html",
        "report.md",
    }  # fmt: skip
    seconds = {record["part"]: record["value"] for record in read_records(run) if record["metric"] == "seconds"}
    assert list(seconds) == ["search", "efficiency", "slides", "maps"]
    assert json.loads((run / "config.json").read_text())["tiles"] == 500
    assert all(record["seed"] == 5 for record in read_records(run))


@pytest.mark.slow
def test_other_packages_are_measured_beside_ours(run):
    measured = {r["attention"] for r in read_records(run / "efficiency") if r["metric"] == "time"}
    assert measured == {"standard", "nystrom-64", "nystrom-local-64", "nystrom-attention", "transformers"}


@pytest.mark.slow
def test_the_page_has_every_part_and_no_gap(run):
    page = (run / "report.html").read_text(encoding="utf-8")
    titles = ["In short", "A real model, one line changed", "Training on long input", "Efficiency", "Attention maps"]
    assert re.findall(r"<h2 [^>]*>([^<]*)</h2>", page) == titles
    assert "Not among the given runs" not in page
    assert page.count("<svg ") == 2  # time and memory
    assert "nystrom-local, m = 64" in page


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "'--steps': '0': must be a whole number from 1"),
        (["--tiles", "10"], "'--tiles': '10': must be a whole number from 500"),
        (["--lengths", "x"], "must be whole numbers separated by commas"),
        (["--model", "no/such/folder"], "no/such/folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, capsys):
    out = tmp_path / "run"
    assert main([*SHORT, *arguments, "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert not out.exists()


def test_absent_weights_are_said_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nystromformer.demo.search.WEIGHTS", "no_such_weights")
    assert main([*SHORT, "--out", str(tmp_path / "run")]) == 2
    assert "the weights of MiniLM are not installed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main([*SHORT, "--out", str(tmp_path)]) == 2
    assert "must be a new or empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
