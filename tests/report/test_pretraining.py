"""Curves and table of pretraining, from records alone."""

from nystromformer.records import Recorder, read_records
from nystromformer.report.pretraining_curves import draw_curves, runs_of
from nystromformer.report.pretraining_table import pretraining_table

CONFIG = {"attention": "linear", "from": None, "size": "mini", "batch_size": 16, "max_length": 512, "seed": 0}


def write_run(folder, end=True, **changes):
    recorder = Recorder(folder, job="pretrain", config=CONFIG | changes)
    for step in (10, 20):
        details = {"step": step, "seconds": step * 60.0, "tokens": step * 1000}
        recorder.record("dev_mlm_accuracy", step / 100, **details)
        recorder.record("dev_sop_accuracy", 0.5 + step / 100, **details)
        recorder.record("train_loss", 3.0, step=step)
    if end:
        result = {"step": 20, "seconds": 1200.0, "tokens": 2_000_000, "tokens_per_second": 1666.7, "parameters": 10**7}
        recorder.record("mlm_accuracy", 0.2, sop_accuracy=0.7, **result)
    return folder


def test_runs_are_told_apart_by_what_differs(tmp_path):
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", seed=1),
        write_run(tmp_path / "c", attention="standard"),
        write_run(tmp_path / "d", attention="standard", **{"from": "models/minilm", "size": None}),
    ]
    found = runs_of(read_records(*runs))
    assert [run.label for run in found] == ["linear, seed 0", "linear, seed 1", "standard", "standard, from minilm"]
    assert [point["value"] for point in found[0].points["dev_sop_accuracy"]] == [0.6, 0.7]


def test_all_runs_are_drawn_in_each_figure(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", attention="standard", end=False)]
    paths = draw_curves(read_records(*runs), tmp_path / "figures")
    assert [path.name for path in paths] == [
        "accuracy_steps.png", "accuracy_steps.svg", "accuracy_time.png", "accuracy_time.svg",
    ]  # fmt: skip
    for path in paths[1::2]:
        drawn = path.read_text()
        for text in ("linear", "standard", "masked words, validation accuracy", "sentence order, validation accuracy"):
            assert f"<!-- {text} -->" in drawn
    assert "<!-- minutes of training -->" in paths[3].read_text()


def test_the_table_shows_what_was_spent(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", end=False)]
    table = pretraining_table(read_records(*runs))
    assert table.count("\n") == 3, "a run that is not finished has no row"
    for text in ("from scratch, mini", "20.0%", "70.0%", "16 × 512", "2.00 M", "20.0 min", "1,667", "10.0 M"):
        assert text in table
    assert pretraining_table([]) == "No finished run.\n"
