"""The report on the command line, from records of every kind, of some kinds, and of kinds it does not know."""

import html
import json
import re

import pytest
from report_runs import write_all, write_attention_map, write_bench, write_lra, write_pretraining

from nystromformer.cli import main
from nystromformer.records import Recorder

SECTIONS = ["Efficiency", "Long Range Arena", "Pretraining", "Fine-tuning", "Distillation", "Attention maps"]


def report(*runs, out):
    """The page and its Markdown."""
    assert main(["report", *map(str, runs), "--out", str(out)]) == 0
    return (out / "report.html").read_text(), (out / "report.md").read_text()


def headings(page):
    return re.findall(r'<h2 id="[^"]*">([^<]*)</h2>', page)


def test_runs_of_every_kind_leave_no_gap(tmp_path, capsys):
    page, text = report(write_all(tmp_path / "runs"), out=tmp_path / "report")
    assert headings(page) == SECTIONS
    assert 'class="gap"' not in page
    assert capsys.readouterr().out.strip() == f"Report: {tmp_path / 'report' / 'report.html'}"
    assert page.count("<svg ") == 6  # time and memory; ListOps; pretraining by steps and by time; distillation
    assert page.count("data:image/png;base64,") == 1
    for found in (
        "50.0 ms (30.0×) [12.6×]",
        "36.00 (37.15)",
        "from scratch, mini",
        "91.00 (91.40)",
        "0.9600 (0.9300)",
        "0.300",
    ):
        assert found in page.replace("\u00a0", " "), "a result, beside the paper's where there is one"
        assert found in text


def test_what_no_run_gave_is_a_named_gap(tmp_path, capsys):
    page, text = report(write_bench(tmp_path / "runs" / "bench").parent, out=tmp_path / "report")
    assert headings(page) == SECTIONS
    assert page.count('class="gap"') == 5
    assert page.count("<figure") == 2, "no figure without a run"
    for command in ("lra all --preset mini", "pretrain --corpus", "finetune sst2", "attention-map --model"):
        assert f"nystromformer {command}" in page
        assert f"nystromformer {command}" in text
    assert (
        "no runs for: Long Range Arena, Pretraining, Fine-tuning, Distillation, Attention maps"
        in capsys.readouterr().out
    )


def test_figures_say_what_made_them(tmp_path):
    folder = write_bench(tmp_path / "bench")
    (record, *_) = map(json.loads, (folder / "records.jsonl").read_text().splitlines())
    page, text = report(folder, out=tmp_path / "report")
    machine = record["machine"]
    for made in (
        record["command"],
        "seed 3",
        "9 s of timing per length",
        machine["processor"],
        record["versions"]["torch"],
    ):
        assert made in html.unescape(page)
        assert made in text


def test_nothing_is_fetched_from_elsewhere(tmp_path):
    page, _ = report(write_all(tmp_path / "runs"), out=tmp_path / "report")
    addresses = re.findall(r"""\b(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert addresses
    assert {re.match(r"#|data:", address) is not None for address in addresses} == {True}


def test_figures_are_files_that_the_markdown_links(tmp_path):
    _, text = report(write_all(tmp_path / "runs"), out=tmp_path / "report")
    linked = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(linked) == 7
    for path in linked:
        assert (tmp_path / "report" / path).is_file()
    svg = [path for path in linked if path.endswith(".svg")]
    assert len(svg) == 6
    assert all((tmp_path / "report" / path).with_suffix(".png").is_file() for path in svg)


def test_measurements_of_different_inputs_are_kept_apart(tmp_path):
    runs = [write_bench(tmp_path / "one"), write_bench(tmp_path / "four", batch=4, backward=True)]
    _, text = report(*runs, out=tmp_path / "report")
    assert "### One call, forward, batch 1, 12 heads × 64" in text
    assert "### One call, forward and backward, batch 4, 12 heads × 64" in text
    assert text.count("| nystrom-64 | 25.0 ms (15.0×) [5.6×] | 50.0 ms (30.0×) [12.6×] |") == 2


def test_exact_attention_comes_first_and_small_presets_are_not_the_papers(tmp_path):
    runs = [write_lra(tmp_path / name, name, seed=seed) for seed, name in enumerate(("nystrom-64", "standard"))]
    _, text = report(*runs, out=tmp_path / "report")
    assert text.index("| standard | 36.00 (37.10)") < text.index("| nystrom-64 | 36.00 (37.15)")
    assert "Presets other than `paper` take fewer steps" in text
    assert "seeds 0, 1; listops: 600 steps of 32 × 256 tokens" in text
    _, paper = report(write_lra(tmp_path / "paper", preset="paper"), out=tmp_path / "other")
    assert "Presets other than" not in paper


@pytest.mark.parametrize("number, drawn", [(6, 1), (7, 0)])
def test_curves_are_drawn_where_they_can_be_told_apart(number, drawn, tmp_path):
    runs = [write_lra(tmp_path / f"{seed}", seed=seed) for seed in range(number)]
    page, text = report(*runs, out=tmp_path / "report")
    assert page.count("<figure") == drawn
    assert "36.00 ± 0.00 (37.15)" in text


def test_a_pretraining_run_under_way_has_curves_and_no_row(tmp_path):
    page, text = report(write_pretraining(tmp_path / "run", end=False), out=tmp_path / "report")
    assert page.count("<svg ") == 2
    assert "No finished run." in text
    assert "No finished run." in page


def test_attention_errors_are_means_over_heads(tmp_path):
    _, text = report(write_attention_map(tmp_path / "map"), out=tmp_path / "report")
    assert "### MiniLM on article.txt" in text
    assert "| nystrom-64 | 0.300 | 0.500 |" in text


def test_a_picture_that_is_gone_leaves_its_table(tmp_path):
    folder = write_attention_map(tmp_path / "map")
    (folder / "layer-0.png").unlink()
    page, text = report(folder, out=tmp_path / "report")
    assert "<img" not in page
    assert "| nystrom-64 | 0.300 | 0.500 |" in text


def test_records_that_no_section_shows_are_named(tmp_path):
    recorder = Recorder(tmp_path / "runs" / "study", job="study-of-mine", config={"any": "thing"})
    recorder.record("cosine", {"mean": 0.5, "least": 0.1})
    recorder.record("worst case", None)
    page, text = report(tmp_path / "runs", out=tmp_path / "report")
    assert headings(page) == [*SECTIONS, "Other records"]
    assert f"| study-of-mine | {tmp_path / 'runs' / 'study'} | 2 | cosine, worst case |" in text


def test_folders_without_records_are_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "absent"):
        assert main(["report", str(tmp_path / folder), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert "holds no records.jsonl" in error
        assert len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_damaged_records_are_refused_in_one_line(tmp_path, capsys):
    folder = write_bench(tmp_path / "bench")
    whole = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(whole[:100] + "\n" + whole)
    assert main(["report", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert "line 1: not a JSON object" in capsys.readouterr().err


@pytest.mark.parametrize("several", [False, True])
def test_a_record_that_lacks_a_field_is_refused_with_its_folder(several, tmp_path, capsys):
    folder = write_lra(tmp_path / "damaged")
    runs = [write_lra(tmp_path / "whole"), folder] if several else [folder]
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    for record in records:
        del record["config"]["preset"]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert f"{folder}: a record lacks the field 'preset'" in error


@pytest.mark.parametrize("folder", ["results/bench", "results/fidelity", "results/scaling", "results"])
def test_the_results_of_this_repository_are_accepted(folder, tmp_path, request):
    page, _ = report(request.config.rootpath / folder, out=tmp_path / "report")
    assert headings(page)[: len(SECTIONS)] == SECTIONS
