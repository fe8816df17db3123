"""Every Python block of the README and the guides runs in order, as one session per page, and so does the notebook."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session: dict[str, object] = {}
    for block in python_blocks(page):
        exec(compile(block, page.name, "exec"), session)


@pytest.mark.slow(seconds=15)
def test_the_notebook_of_the_first_minutes_runs(tmp_path):
    """In a kernel of its own, as readers run it; the copy in the repository has no outputs that could grow old."""
    notebook = nbformat.read(ROOT / "examples" / "first_minutes.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert said.count(" tokens: exact ") == 4
    assert "cosine of the embeddings: 0.99" in said or "cosine of the embeddings: 1.0" in said
    assert float(said.rpartition("loss after 30 steps: ")[2]) < 0.7
