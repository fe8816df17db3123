"""The report on the command line and its page."""

import re

import pytest

from nystromformer.cli import main
from nystromformer.records import Recorder
from nystromformer.report.page import Section, html_page, markdown_html

SHARED = {"batch": 1, "heads": 12, "head_dim": 64, "backward": False, "length": 8192}


@pytest.fixture
def bench_run(tmp_path):
    folder = tmp_path / "runs" / "bench"
    recorder = Recorder(folder, job="bench", config={}, seed=3)
    for attention, seconds, peak in (("standard", 1.5, 25_000_000), ("nystrom-64", 0.05, 50_000_000)):
        recorder.record("peak_memory", peak, skipped="", failure="", attention=attention, **SHARED)
        recorder.record("time", seconds, minimum=seconds, attention=attention, **SHARED)
    return folder


def test_a_page_holds_its_figures_and_names_its_gaps(bench_run, tmp_path, capsys):
    out = tmp_path / "report"
    assert main(["report", str(bench_run.parent), "--out", str(out)]) == 0
    assert "no runs for: Long Range Arena, Fine-tuning, Attention error" in capsys.readouterr().out
    page = (out / "report.html").read_text()
    assert "50.0 ms (30.0×) [12.6×]" in page
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "nystromformer lra all --preset mini" in page
    assert "seed 3" in page
    assert not re.search(r"""(src|href)=["']?https?:""", page)  # nothing is fetched
    assert "| nystrom-64 | 50.0 ms (30.0×) [12.6×] |" in (out / "report.md").read_text()


def test_attention_errors_are_means_over_heads(tmp_path):
    recorder = Recorder(tmp_path / "map", job="attention-map", config={})
    for layer, head, value in ((0, 0, 0.2), (0, 1, 0.4), (1, 0, 0.5)):
        recorder.record("matrix_error", value, attention="nystrom", num_landmarks=64, layer=layer, head=head)
    assert main(["report", str(tmp_path / "map"), "--out", str(tmp_path / "out")]) == 0
    assert "| nystrom-64 | 0.300 | 0.500 |" in (tmp_path / "out" / "report.md").read_text()


def test_text_is_escaped():
    page = html_page("<b>", "a < b", [Section("x", ("| <i> |\n|---|\n| & |",))])
    assert "<title>&lt;b&gt;</title>" in page
    assert "&lt;i&gt;" in page
    assert "<i>" not in page


def test_markdown_tables_become_tables():
    assert markdown_html("### Head\n\nA `b` c\n\n| a |\n|---|\n| nystrom-64 |") == (
        "<h3>Head</h3>\n<p>A <code>b</code> c</p>\n"
        '<div class="scroll"><table><thead><tr><th>a</th></tr></thead><tbody><tr class=ours><td>nystrom-64</td></tr>'
        "</tbody></table></div>"
    )


def test_folders_without_records_are_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "absent"):
        assert main(["report", str(tmp_path / folder), "--out", str(tmp_path / "out")]) == 2
        assert "holds no records.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
