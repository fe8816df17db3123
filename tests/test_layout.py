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
INSIDE = {
    "attention/native": set(),
    "attention/shared": {"native"},
    "attention/nystrom": {"native", "shared", "base"},
    "attention/nystrom_local": {"native", "shared", "base", "nystrom"},
    "integrations/hf": {"offered"},
    "training/shared": set(),
    "training/finetuning": {"shared", "run", "sweep", "trainer"},
    "training/distillation": {"shared", "run", "sweep", "trainer", "finetuning"},
}
"""What a sub-folder may import of the folder around it, besides itself."""
MOST_FILES = 12
"""In a folder, besides `__init__.py`."""


def imported(path: Path, folder: str = "") -> set[str]:
    """The parts of the package, or of a folder of it, that a file imports."""
    parts, around = set(), f"nystromformer.{folder}".rstrip(".")
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide the direction"
            names = [f"{node.module}.{alias.name}" if node.module == around else node.module for alias in node.names]
        parts |= {name.removeprefix(f"{around}.").split(".")[0] for name in names if name.startswith(f"{around}.")}
    return {part for part in parts if not part.isupper()}  # constants of a folder's `__init__.py`, known without torch


@pytest.mark.parametrize("folder", [folder for folder in ALLOWED if (PACKAGE / folder).is_dir()])
def test_imports_go_one_way(folder):
    for path in (PACKAGE / folder).rglob("*.py"):
        surplus = imported(path) - ALLOWED[folder] - EVERYWHERE - {folder}
        assert not surplus, f"{path.relative_to(PACKAGE)} imports {surplus}; allowed: {ALLOWED[folder]}"


@pytest.mark.parametrize("place", INSIDE)
def test_imports_go_one_way_between_sub_folders(place):
    folder, sub_folder = place.split("/")
    for path in (PACKAGE / place).rglob("*.py"):
        surplus = imported(path, folder) - INSIDE[place] - {sub_folder}
        assert not surplus, f"{path.relative_to(PACKAGE)} imports {surplus}; allowed: {INSIDE[place]}"


def test_a_folder_has_at_most_a_dozen_files():
    for folder in [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]:
        files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        assert len(files) <= MOST_FILES, f"{folder.relative_to(PACKAGE)}: {len(files)} files"


def test_every_folder_has_its_place():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert folders <= ALLOWED.keys() | {"commands", "demo"}


def test_the_operation_needs_torch_only():
    code = "from nystromformer import NystromAttention, build_attention, nystrom_attention"
    assert not imported_by(code, "transformers", "safetensors", "typer", "matplotlib", "sklearn")
