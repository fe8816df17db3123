"""Figures from records: what is drawn, what its points say, and that the same records give the same bytes."""

from xml.etree import ElementTree

import pytest
from report_runs import write_pretraining as write_run

from nystromformer.records import Recorder, read_records
from nystromformer.report.efficiency import Entry
from nystromformer.report.figures import Drawing, draw_dev_accuracy, draw_efficiency, draw_pretraining, pretraining_runs

SVG = "{http://www.w3.org/2000/svg}"


def words(svg: bytes) -> list[str]:
    """The texts of a drawing, as a reader sees them."""
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def tips(svg: bytes) -> list[str]:
    return [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]


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
    records = list(read_records(*(tmp_path / run for run in ("seed-1", "seed-2", "exact", "started"))))
    png, svg = draw_dev_accuracy(records, "listops").save(tmp_path / "curves" / "listops")
    assert png.read_bytes().startswith(b"\x89PNG")
    drawn = words(svg.read_bytes())
    for text in ("nystrom-64: 31.50 ± 0.71 (37.15), 2 seeds", "standard: – (37.10)", "most frequent class"):
        assert drawn.count(text) == 1
    assert not any("performer" in text for text in drawn)
    said = tips(svg.read_bytes())
    assert "nystrom-64, seed 2, step 50: 20.00% on the dev set" in said
    assert "nystrom-64, seed 2, step 100: 32.00% on the test set" in said
    assert len(said) == 2 * 3 + 1
    other = [record | {"config": record["config"] | {"data_departures": ["64 to 256 tokens"]}} for record in records]
    _, apart = draw_dev_accuracy(other, "listops").save(tmp_path / "curves" / "other")
    assert "nystrom-64: 31.50 ± 0.71, 2 seeds" in words(apart.read_bytes())
    assert not any("paper" in text for text in words(apart.read_bytes()))
    assert "nystrom-64 (64 to 256 tokens), seed 2, step 100: 32.00% on the test set" in tips(apart.read_bytes())


def test_pretraining_runs_are_told_apart_by_what_differs(tmp_path):
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", seed=1),
        write_run(tmp_path / "c", attention="standard"),
        write_run(tmp_path / "d", attention="standard", **{"from": "models/minilm", "size": None}),
    ]
    found = pretraining_runs(read_records(*runs))
    assert [run.label for run in found] == [
        "linear, seed 0", "linear, seed 1", "standard, from scratch", "standard, from minilm",
    ]  # fmt: skip
    assert [point["value"] for point in found[0].points["dev_sop_accuracy"]] == [0.6, 0.7]


def test_all_pretraining_runs_are_drawn_in_each_figure(tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", attention="standard", end=False)]
    drawings = {name: drawing.render(name) for name, drawing in draw_pretraining(read_records(*runs)).items()}
    assert list(drawings) == ["accuracy_steps", "accuracy_time"]
    for content in drawings.values():
        drawn = words(content[".svg"])
        titles = ("masked words, validation accuracy", "sentence order, validation accuracy")
        for text in ("linear", "standard", "chance", *titles):
            assert text in drawn
    assert "minutes of training" in words(drawings["accuracy_time"][".svg"])
    assert "linear, 20 minutes of training: 70.00%" in tips(drawings["accuracy_time"][".svg"])
    again = {name: drawing.render(name) for name, drawing in draw_pretraining(read_records(*runs)).items()}
    assert again == drawings


def test_every_measurement_says_its_value():
    entries = {"standard": {512: Entry(0.0123, 0.01, bytes=5_000_000)}, "linear": {512: Entry(reason="out of memory")}}
    drawings = {name: drawing.render(name)[".svg"] for name, drawing in draw_efficiency(entries).items()}
    assert tips(drawings["time"]) == ["standard, n = 512: 12.3 ms"]
    assert tips(drawings["memory"]) == ["standard, n = 512: 5 MB"]


def test_points_without_a_place_are_left_out_and_names_are_no_formulas():
    drawing, (axes,) = Drawing.panels(1)
    label = r"$\frac$ <script>&_"
    drawing.line(axes, [(1, float("nan"), "lost"), (2, 0.5, "half & <b>"), (3, float("inf"), "lost")], label)
    drawing.line(axes, [(1, 0.5, "other")], "_underscore")
    drawing.legend(axes, 2)
    drawn = drawing.render("names")[".svg"]
    assert tips(drawn) == ["half & <b>", "other"]
    assert label in words(drawn)
    assert any("_underscore" in text for text in words(drawn))


@pytest.mark.parametrize(
    "label", ["linear", "nystrom-local-64, 512 tokens, stages layers + model", "W" * 200, "a b " * 60]
)
@pytest.mark.parametrize("number", [1, 2, 9])
def test_legends_stay_inside_the_figure(label, number):
    drawing, (axes,) = Drawing.panels(1)
    for place in range(number):
        drawing.line(axes, [(0, place, ""), (1, place, "")], f"{place} {label}")
    drawing.legend(axes, 3)
    drawing.render("legend")  # which gives everything its place
    (legend,) = drawing.figure.legends
    assert len(legend.get_texts()) == number
    box, figure = legend.get_window_extent(), drawing.figure.bbox
    assert figure.x0 <= box.x0 < box.x1 <= figure.x1
    assert figure.y0 <= box.y0 < box.y1 <= figure.y1
    assert box.y1 <= axes.get_window_extent().y0, "and below the panel"
    assert axes.get_window_extent().height > 2.5 * drawing.figure.dpi, "which stays as high as it was"


def test_two_drawings_on_one_page_share_no_name():
    entries = {"standard": {512: Entry(0.0123, 0.01, bytes=5_000_000)}}
    names = [
        {
            element.get("id")
            for element in ElementTree.fromstring(draw_efficiency(entries)["time"].render(salt)[".svg"]).iter()
        }
        for salt in ("a", "b")
    ]
    assert names[0] & names[1] <= {None}
