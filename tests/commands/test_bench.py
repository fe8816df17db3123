"""`nystromformer bench` on the command line."""

import json

import pytest

from nystromformer.cli import main


@pytest.mark.slow
def test_writes_records_tables_and_plots(tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["bench", "--lengths", "64,128", "--attention", "standard,nystrom-16", "--budget", "0.1"]
    assert main([*arguments, "--heads", "2", "--head-dim", "8", "--out", str(out)]) == 0
    assert "nystrom-16" in capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "records.jsonl", "table.md", "time.png", "time.svg", "memory.png", "memory.svg"}
    record = json.loads((out / "records.jsonl").read_text().splitlines()[0])
    assert {"job", "config", "metric", "value", "seed", "versions", "machine"} <= record.keys()
    assert record["config"]["lengths"] == [64, 128]
    assert main([*arguments, "--out", str(out)]) == 2  # never over another job's records
    assert "holds the records of a job already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--attention", "nystrm-64"], "attention 'nystrm-64': must be one of standard"),
        (["--attention", "standard-3"], "takes no number"),
        (["--attention", ","], "--attention ',': must be names separated by commas"),
        (["--lengths", "0"], "--lengths '0': must be whole numbers separated by commas, each from 1 to 1,048,576"),
        (["--lengths", "many"], "--lengths 'many': must be whole numbers"),
        (["--lengths", "2097152"], "each from 1 to 1,048,576"),
        (["--device", "meta"], "device 'meta': must be one of cpu"),
        (["--budget", "0"], "Invalid value for '--budget'"),
        (["--budget", "nan"], "Invalid value for '--budget'"),
        (["--budget", "-1"], "Invalid value for '--budget'"),
        (["--cell-limit", "nan"], "Invalid value for '--cell-limit'"),
        (["--batch", "1000000000000"], "Invalid value for '--batch'"),
        (["--batch", "65536", "--heads", "1024"], "the smallest input alone would need"),
        (["--device", "cuda:7"], "device 'cuda:7': must be one of cpu"),
        (["--device", "toaster"], "device 'toaster': must be one of cpu"),
        (["--dtype", "int8"], "Invalid value for '--dtype'"),
        (["--heads", "0"], "Invalid value for '--heads'"),
        (["--batch", "x"], "Invalid value for '--batch'"),
        (["--nothing"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["bench", "--out", str(out), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("nystromformer: ")
    assert len(captured.err.strip().splitlines()) == 1
    assert not out.exists()
