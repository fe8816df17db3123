"""The whole report: one HTML page, the same as Markdown, and its figures as files."""

from collections.abc import Iterable
from pathlib import Path

from nystromformer.files import write_text
from nystromformer.report.page import Section, html_page, markdown_page
from nystromformer.report.runs import read_runs
from nystromformer.report.sections import all_sections

PAGE, MARKDOWN, FIGURES = "report.html", "report.md", "figures"
TITLE = "Nyströmformer: what was measured"
INTRO = "Ours beside the paper's. Every figure comes from the records of runs, which its section names."


def write_report(runs: Iterable[Path], out: Path) -> list[Section]:
    """Write the report of `runs` into `out`; returns its sections. `ValueError` for folders without records."""
    records = read_runs(runs)
    sections = all_sections(records, out / FIGURES)
    write_text(out / MARKDOWN, markdown_page(TITLE, INTRO, sections, out))
    write_text(out / PAGE, html_page(TITLE, INTRO, sections))
    return sections
