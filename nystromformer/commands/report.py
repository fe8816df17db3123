"""`nystromformer report`: one page from the records of any runs."""

from pathlib import Path
from typing import Annotated

import typer

from nystromformer.commands import new_folder
from nystromformer.errors import user_input


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders that hold some at any depth.")],
    out: Annotated[Path, new_folder("Folder for report.html, report.md and the figures.")] = Path("runs/report"),
) -> None:
    """Put runs together on one self-contained HTML page, with the paper's numbers beside ours.

    What no run gave is named on the page, with the command that would make it.

    Example: `nystromformer report runs/bench runs/lra --out runs/report`
    """
    from nystromformer.report.page import PAGE, write_report

    with user_input():
        sections = write_report(runs, out)
    gaps = [section.title for section in sections if section.is_gap]
    typer.echo(f"Report: {out / PAGE}" + (f" (no runs for: {', '.join(gaps)})" if gaps else ""))
