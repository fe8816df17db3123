import json

import pytest

from nystromformer.files import write_text
from nystromformer.records import Recorder, read_records, result_in, results


def test_a_line_cut_short_by_a_kill_is_left_out_and_other_damage_named(tmp_path):
    Recorder(tmp_path, job="a", config={}).record("x", 1)
    path = tmp_path / "records.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    assert [r["value"] for r in read_records(tmp_path)] == [1]
    path.write_text(whole[:20] + "\n" + whole)
    with pytest.raises(ValueError, match="line 1: not a JSON object with job, metric and value; remove the line"):
        list(read_records(tmp_path))


def test_records_say_what_made_them(tmp_path):
    Recorder(tmp_path, job="a", config={"b": 1}, seed=3).record("x", 1.5, unit="s")
    (record,) = read_records(tmp_path)
    assert record["seed"] == 3
    assert record["config"] == {"b": 1}
    assert record["versions"]["torch"]
    assert record["command"]
    assert record["machine"]["cores"] >= 1


def test_a_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "folder" / "file.json"
    write_text(path, json.dumps([1]))
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert json.loads(path.read_text()) == [1]
    assert [each.name for each in path.parent.iterdir()] == ["file.json"]


def test_the_result_of_a_run_is_there_once_it_is_finished(tmp_path):
    assert result_in(tmp_path / "absent") is None
    run = Recorder(tmp_path / "run", job="lra", config={})
    run.record("dev_accuracy", 0.3)
    assert result_in(tmp_path / "run") is None
    run.record("test_accuracy", 0.4)
    assert result_in(tmp_path / "run")["value"] == 0.4
    Recorder(tmp_path / "other", job="bench", config={}).record("time", 1.5)
    assert result_in(tmp_path / "other") is None
    records = list(read_records(tmp_path / "run", tmp_path / "other"))
    assert [record["value"] for record in results(records, "lra")] == [0.4]
    assert results(records, "pretrain") == []
