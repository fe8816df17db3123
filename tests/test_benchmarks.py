"""Every script of `benchmarks/` can be imported: names that it takes from the package are still there."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("script", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_a_script_can_be_imported(script, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    importlib.import_module(script)
