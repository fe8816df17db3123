"""The demo's sections and its short table, from records alone."""

import pytest
from report_runs import write_bench, write_demo

from nystromformer.records import read_records
from nystromformer.report.demo import demo_sections, gains_table
from nystromformer.report.page import read_runs, write_report


@pytest.fixture
def run(tmp_path):
    write_demo(tmp_path / "demo")
    write_bench(tmp_path / "demo" / "efficiency", lengths=(128, 8192))
    return tmp_path / "demo"


def test_the_table_says_what_was_gained(run):
    table = gains_table([*read_records(run), *read_records(run / "efficiency")])
    assert [list(row) for row in table.rows] == [
        ["2 questions: the passage found", "as reference", "1 the same", "1 other than with exact attention"],
        [
            "MiniLM reads a document of 8,192 tokens", "9.0 s", "3.0 s",
            "3.0 times faster; cosine 0.99 to the exact embedding",
        ],
        [
            "One attention call on 8,192 tokens", "1.5 s", "50 ms",
            "30 times faster; faster from about 270 tokens on",
        ],
        ["Memory of that call, besides its input", "25 MB", "50 MB", "2.0 times more memory"],
        ["A training step, 4 slides of 8,192 tiles", "8.0 s", "400 ms", "20 times faster"],
        [
            "Slides told apart after 40 s of training", "50% (5 steps)", "100% (100 steps)",
            "+50 points in the same time",
        ],
    ]  # fmt: skip


def test_what_is_no_gain_is_not_called_one(tmp_path):
    write_bench(tmp_path, our_peak=24.9e6)
    _, memory = gains_table(read_records(tmp_path)).rows
    assert list(memory[1:3]) == ["25 MB", "25 MB"]
    assert memory[3].startswith("about the same memory: PyTorch's exact attention makes no n×n matrix either; ")


def test_sections_show_headlines_questions_and_the_slide(run):
    short, search, slides = demo_sections(read_runs([run]))
    assert [line.figure for line in short.headlines] == ["1 of 2", "3.0×", "20×", "100%"]
    assert "the same" in search.parts[0].tables[0].rows[0]
    assert len(slides.parts[0].pictures) == 1


def test_without_a_demo_there_are_no_such_sections(tmp_path):
    assert demo_sections(read_runs([write_bench(tmp_path)])) == []


def test_a_page_may_leave_out_gaps(run, tmp_path):
    sections = write_report([run], tmp_path / "out", title="A title", gaps=False)
    assert [section.title for section in sections] == [
        "In short", "A real model, one line changed", "Training on long input", "Efficiency",
    ]  # fmt: skip
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<h1>A title</h1>" in page
    assert "Not among the given runs" not in page
