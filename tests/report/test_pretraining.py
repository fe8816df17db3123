"""Curves and table of pretraining, from records alone."""

from report_runs import write_pretraining as write_run

from nystromformer.records import read_records
from nystromformer.report.pretraining_curves import draw_curves, runs_of
from nystromformer.report.pretraining_table import pretraining_table


def test_runs_are_told_apart_by_what_differs(tmp_path):
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", seed=1),
        write_run(tmp_path / "c", attention="standard"),
        write_run(tmp_path / "d", attention="standard", **{"from": "models/minilm", "size": None}),
    ]
    found = runs_of(read_records(*runs))
    assert [run.label for run in found] == [
        "linear, seed 0", "linear, seed 1", "standard, from scratch", "standard, from minilm",
    ]  # fmt: skip
    assert [point["value"] for point in found[0].points["dev_sop_accuracy"]] == [0.6, 0.7]


def test_all_runs_are_drawn_in_each_figure(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", attention="standard", end=False)]
    paths = draw_curves(read_records(*runs), tmp_path / "figures")
    assert [path.name for path in paths] == [
        "accuracy_steps.png", "accuracy_steps.svg", "accuracy_time.png", "accuracy_time.svg",
    ]  # fmt: skip
    for path in paths[1::2]:
        drawn = path.read_text()
        titles = ("masked words, validation accuracy", "sentence order, validation accuracy")
        for text in ("linear", "standard", "chance", *titles):
            assert f"<!-- {text} -->" in drawn
    assert "<!-- minutes of training -->" in paths[3].read_text()
    again = draw_curves(read_records(*runs), tmp_path / "again")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in paths]


def test_the_table_shows_what_was_spent(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", end=False)]
    table = pretraining_table(read_records(*runs))
    assert table.count("\n") == 3, "a run that is not finished has no row"
    for text in ("from scratch, mini", "20.0%", "70.0%", "16 × 512", "2.00 M", "20.0 min", "1,667", "10.0 M"):
        assert text in table
    assert pretraining_table([]) == "No finished run.\n"
