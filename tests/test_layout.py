"""Imports go one way, and the core needs torch alone."""

import ast
from pathlib import Path

import pytest
from imports import imported_by

PACKAGE = Path(__file__).parents[1] / "nystromformer"
EVERYWHERE = {"checks", "errors", "files"}
"""Small modules that need nothing of the package, which any folder may import."""
ALLOWED = {
    "attention": set(),
    "models": {"attention"},
    "integrations": {"attention", "models"},
    "distributed": {"attention", "models"},
    "data": {"progress"},
    "training": {"attention", "models", "integrations", "data", "records", "paper", "progress", "report"},
    "bench": {"attention", "models", "integrations", "paper", "records", "progress", "report"},
    "report": {"paper", "records"},
}
"""What each folder may import besides itself; commands, the demo and the command line may import everything."""


def imported(path: Path) -> set[str]:
    """The parts of the package that a file imports."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide the direction"
            names = [node.module]
        parts |= {name.split(".")[1] for name in names if name.startswith("nystromformer.")}
    return parts


@pytest.mark.parametrize("folder", [folder for folder in ALLOWED if (PACKAGE / folder).is_dir()])
def test_imports_go_one_way(folder):
    for path in (PACKAGE / folder).rglob("*.py"):
        surplus = imported(path) - ALLOWED[folder] - EVERYWHERE - {folder}
        assert not surplus, f"{path.relative_to(PACKAGE)} imports {surplus}; allowed: {ALLOWED[folder]}"


def test_every_folder_has_its_place():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert folders <= ALLOWED.keys() | {"commands", "demo"}


def test_the_operation_needs_torch_only():
    code = "from nystromformer import NystromAttention, build_attention, nystrom_attention"
    assert not imported_by(code, "transformers", "safetensors", "typer", "matplotlib", "sklearn")
