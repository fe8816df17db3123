import pytest

from nystromformer.records import Recorder, command, drop_records, read_config, read_records, result_in, results


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


@pytest.mark.parametrize(
    "line",
    [b"[1]", b"{}", b"\0", b"\xff\xfe", b"1", b'{"job": "a", "metric": 1, "value": 2}', b"[" * 100_000, b"9" * 5_000],
    ids=["list", "empty", "NUL", "not UTF-8", "number", "metric", "deep", "digits"],
)
def test_damage_is_named_by_file_and_line(tmp_path, line):
    recorder = Recorder(tmp_path, job="a", config={})
    recorder.record("x", 1)
    path = tmp_path / "records.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n")
    recorder.record("x", 2)
    with pytest.raises(ValueError, match="records.jsonl, line 2: not a JSON object with job, metric and value"):
        list(read_records(tmp_path))


def test_a_line_that_was_cut_short_does_not_spoil_the_next(tmp_path):
    recorder = Recorder(tmp_path, job="a", config={})
    path = tmp_path / "records.jsonl"
    recorder.record("x", 1)
    with open(path, "ab") as file:
        file.write(b'{"job": "a", "met')
    recorder.record("x", 2)
    path.write_bytes(path.read_bytes()[:-1])  # whole, but for the end of the line
    recorder.record("x", 3)
    assert [record["value"] for record in read_records(tmp_path)] == [1, 2, 3]


def test_a_full_disk_leaves_the_records_as_they_were(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, job="a", config={})
    recorder.record("x", 1)
    before = (tmp_path / "records.jsonl").read_bytes()

    def no_space(handle):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("nystromformer.records.os.fsync", no_space)
        with pytest.raises(OSError, match="No space left"):
            recorder.record("x", 2)
    assert (tmp_path / "records.jsonl").read_bytes() == before
    recorder.record("x", 3)
    assert [record["value"] for record in read_records(tmp_path)] == [1, 3]


def test_a_resumed_run_drops_what_it_does_again(tmp_path):
    recorder = Recorder(tmp_path, job="lra", config={})
    for step in (2, 4, 6):
        recorder.record("dev_accuracy", step / 10, step=step)
    recorder.record("test_accuracy", 0.5, step=4)
    drop_records(tmp_path, after=4)
    assert [(record["metric"], record["step"]) for record in read_records(tmp_path)] == [
        ("dev_accuracy", 2), ("dev_accuracy", 4)]  # fmt: skip


def test_names_that_are_not_unicode_can_be_recorded(tmp_path):
    Recorder(tmp_path, job="a", config={"file": "\udcff"}).record("x", 1)
    assert [record["config"]["file"] for record in read_records(tmp_path)] == ["\udcff"]


@pytest.mark.parametrize("content", [b"[]", b"\xff", b"{"])
def test_a_configuration_that_is_none_is_refused_by_its_name(tmp_path, content):
    assert read_config(tmp_path) is None
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match="config.json: .* Put it back as it was, or give another --out"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "program, shown",
    [
        ("/somewhere/bin/nystromformer", "nystromformer lra 'two words'"),
        ("/site-packages/nystromformer/__main__.py", "python -m nystromformer lra 'two words'"),
        ("benchmarks/packed.py", "python benchmarks/packed.py lra 'two words'"),
    ],
)
def test_the_command_is_what_one_would_type_again(program, shown, monkeypatch):
    monkeypatch.setattr("sys.argv", [program, "lra", "two words"])
    assert command() == shown
