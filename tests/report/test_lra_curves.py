"""Curves of Long Range Arena from records."""

from nystromformer.records import Recorder, read_records
from nystromformer.report.lra_curves import draw_dev_accuracy


def test_curves_show_each_run_what_was_tested_and_the_paper(tmp_path):
    for seed in (1, 2):
        config = {"task": "listops", "attention": "nystrom-64", "preset": "paper"}
        recorder = Recorder(tmp_path / f"seed-{seed}", job="lra", config=config, seed=seed)
        recorder.record("dev_accuracy", 0.2, step=50)
        recorder.record("dev_accuracy", 0.3, step=100)
        recorder.record("test_accuracy", 0.30 + seed / 100, step=100, best_step=100, majority=0.17)
    exact = Recorder(tmp_path / "exact", job="lra", config=config | {"attention": "standard"}, seed=1)
    exact.record("dev_accuracy", 0.15, step=50)  # and no further
    started = Recorder(tmp_path / "started", job="lra", config=config | {"attention": "performer-256"}, seed=1)
    started.record("train_loss", 2.3, step=50)  # not evaluated yet
    records = read_records(*(tmp_path / run for run in ("seed-1", "seed-2", "exact", "started")))
    png, svg = draw_dev_accuracy(records, "listops", tmp_path / "curves" / "listops")
    assert png.read_bytes().startswith(b"\x89PNG")
    drawn = svg.read_text()
    legend = ["nystrom-64: 31.50 ± 0.71 (37.15), 2 seeds", "standard: – (37.10)", "most frequent class"]
    for text in legend:
        assert drawn.count(f"<!-- {text} -->") == 1
    assert "performer" not in drawn
