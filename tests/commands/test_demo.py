"""`nystromformer demo`: a real one, made short by its own options."""

import json
import re

import pytest

from nystromformer.cli import main
from nystromformer.demo import print_summary
from nystromformer.records import read_records

SHORT = ["demo", "--steps", "2", "--examples", "32", "--lengths", "128", "--seed", "5"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "run"
    assert main([*SHORT, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_it_makes_trains_measures_draws_and_reports(run):
    assert {path.name for path in run.iterdir()} == {
        "config.json", "records.jsonl", "data", "listops", "efficiency", "attention-map", "figures", "report.html",
        "report.md",
    }  # fmt: skip
    seconds = {record["part"]: record["value"] for record in read_records(run)}
    assert list(seconds) == [
        "data", "training, standard", "training, nystrom-32", "efficiency", "attention maps", "report",
    ]  # fmt: skip
    assert min(seconds.values()) > 0
    assert json.loads((run / "config.json").read_text())["examples"] == 32


def test_both_models_are_trained_alike(run):
    results = []
    for attention in ("standard", "nystrom-32"):
        (record,) = (r for r in read_records(run / "listops" / attention) if r["metric"] == "test_accuracy")
        assert (run / "listops" / attention / "model" / "model.safetensors").is_file()
        assert record["seed"] == 5
        results.append(record)
    standard, nystrom = results
    differences = {name for name in standard["config"] if standard["config"][name] != nystrom["config"][name]}
    assert differences == {"attention"}
    assert nystrom["parameters"] > standard["parameters"]  # the skip convolution


def test_other_packages_are_measured_beside_ours(run):
    measured = {r["attention"] for r in read_records(run / "efficiency") if r["metric"] == "time"}
    assert measured == {"standard", "dense", "nystrom-64", "nystrom-attention", "transformers", "gemm"}


@pytest.mark.parametrize("attention", ["standard", "nystrom-32"])
def test_maps_are_those_of_the_trained_model(attention, run):
    folder = run / "attention-map" / attention
    errors = [r for r in read_records(folder) if r["metric"] == "matrix_error"]
    assert {(r["layer"], r["head"]) for r in errors} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    mean = {m: sum(r["value"] for r in errors if r["num_landmarks"] == m) / 4 for m in (16, 32, 64)}
    assert mean[16] > mean[64] > 0, "more landmarks, less error"
    assert {path.name for path in folder.glob("*.png")} == {"layer-0.png", "layer-1.png", "errors.png"}


def test_the_report_is_of_this_demo(run):
    page = (run / "report.html").read_text()
    assert page.count("<svg ") == 3  # time, memory, accuracy
    assert page.count("data:image/png") == 6
    assert "Preset <code>demo</code>" in page
    assert re.findall(r'class="missing">([^<]*)<', page) == ["Pretraining", "Fine-tuning"]


def test_it_ends_with_short_tables(run, capsys):
    folders = [run, run / "efficiency", run / "listops" / "standard", run / "listops" / "nystrom-32"]
    print_summary(list(read_records(*folders)))
    said = capsys.readouterr().out
    assert len(said.splitlines()) < 30
    for text in ("test accuracy", "nystrom-64 (ours)", "transformers", "n = 128", "saw 64 examples"):
        assert text in " ".join(said.split())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--steps", "0"], "'--steps': '0': must be a whole number from 1"),
        (["--examples", "-1"], "'--examples': '-1': must be a whole number from 1"),
        (["--lengths", "x"], "must be whole numbers separated by commas"),
        (["--device", "toaster"], "'--device': 'toaster': must be one of cpu, cuda"),
        (["--dtype", "int8"], "'--dtype': 'int8': must be one of"),
        (["--dtype", "float64"], "'--dtype': 'float64': must be one of float32, bfloat16, float16"),
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


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main([*SHORT, "--out", str(tmp_path)]) == 2
    assert "must be a new or empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
