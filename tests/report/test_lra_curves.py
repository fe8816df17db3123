"""Curves of Long Range Arena from records."""

from nystromformer.records import Recorder, read_records
from nystromformer.report.lra_curves import draw_dev_accuracy


def test_curves_show_each_run_what_was_tested_and_the_paper(tmp_path):
    for seed in (1, 2):
        config = {"task": "listops", "attention": "nystrom-64", "preset": "paper"}
        recorder = Recorder(tmp_path / f"seed-{seed}", job="lra", config=config, seed=seed)
        recorder.record("dev_accuracy", 0.2, step=50)
        recorder.record("dev_accuracy", 0.3, step=100)
    recorder.record("test_accuracy", 0.311, step=100, best_step=100)
    records = read_records(tmp_path / "seed-1", tmp_path / "seed-2")
    png, svg = draw_dev_accuracy(records, "listops", tmp_path / "curves" / "listops")
    assert png.read_bytes().startswith(b"\x89PNG")
    drawn = svg.read_text()
    for text in (
        "nystrom-64, seed 1, dev",
        "nystrom-64, seed 2: test 31.10 %",
        "nystrom-64, the paper's test: 37.15 %",
    ):
        assert f"<!-- {text} -->" in drawn
    assert "seed 1: test" not in drawn
