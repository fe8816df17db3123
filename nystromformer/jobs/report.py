"""`nystromformer report`: one page from the records of any runs."""

from pathlib import Path
from typing import Annotated

import typer

from nystromformer.errors import UserError, user_input


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold some at any depth.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html, report.md and the figures.")] = Path("runs/report"),
) -> None:
    """Put runs together on one self-contained HTML page, with the paper's numbers beside ours.

    Example: `nystromformer report runs/bench runs/lra --out runs/report`
    """
    from nystromformer.records import RECORDS, read_records, write_text
    from nystromformer.report.page import html_page, markdown_page
    from nystromformer.report.sections import all_sections

    with user_input():
        folders = []
        for run in runs:
            found = sorted(path.parent for path in run.rglob(RECORDS)) if run.is_dir() else []
            if not found:
                raise UserError(f"{run}: holds no {RECORDS}; give the --out folder of a finished job.")
            folders += found
        records = [record for folder in dict.fromkeys(folders) for record in read_records(folder)]
    sections = all_sections(records, out)
    title = "Nyströmformer: what was measured"
    intro = "Ours beside the paper's. Every figure comes from the records of a run, which its section names."
    write_text(out / "report.md", markdown_page(title, intro, sections))
    write_text(out / "report.html", html_page(title, intro, sections))
    gaps = [section.title for section in sections if section.is_gap]
    typer.echo(f"Report: {out / 'report.html'}" + (f" (no runs for: {', '.join(gaps)})" if gaps else ""))
