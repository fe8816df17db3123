"""What pip gets: one name everywhere, dependencies as imported, and a wheel whose core runs on torch alone."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nystromformer.errors import install_hint, missing_package

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nystromformer"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml", *sorted((ROOT / "docs").glob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
NEEDS = {
    "attention": (),
    "distributed": (),
    "models": ("models",),
    "integrations": ("models",),
    "data": ("train",),
    "training": ("train",),
    "bench": ("cli", "models", "peers"),
    "report": ("cli",),
    "cli.py": ("cli",),
    "demo": ("demo",),
    "figures.py": ("cli",),
    "progress.py": ("cli",),
}
"""The extras that a part of the package may import from. Other folders hold the commands, which may use all of them."""
COMMANDS_NEED = ("train", "cli")
NOT_IMPORTED = {
    "accelerate": "Transformers' Trainer imports it",
    "tensorboard": "torch.utils.tensorboard imports it",
}


@cache
def distributions() -> dict[str, list[str]]:
    """The names of the installed distributions that bring a module. Reading them takes a second."""
    return metadata.packages_distributions()


def installed_name() -> str:
    """The name in the metadata, found by another way than the package's own."""
    (name,) = {canonicalize_name(name) for name in distributions()["nystromformer"]}
    return name


def requirements(*extras: str) -> set[str]:
    """Names of what the core and some extras declare, extras of our own followed."""
    found = set()
    for line in [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            found |= requirements(*requirement.extras)
        else:
            found.add(canonicalize_name(requirement.name))
    return found


def imported_modules(path: Path) -> set[str]:
    """Top-level modules that a file imports anywhere, except the standard library and our own."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {"nystromformer"}


def imported_packages(path: Path) -> set[str]:
    """The distributions that bring what a file imports."""
    return {canonicalize_name(distributions()[module][0]) for module in imported_modules(path)}


def extras_for(path: Path) -> tuple[str, ...]:
    part = path.relative_to(PACKAGE).parts[0]
    return NEEDS.get(part, COMMANDS_NEED if (PACKAGE / part).is_dir() else ())


def test_pyproject_and_hints_have_the_name_of_the_metadata():
    assert PROJECT["name"] == installed_name()
    assert install_hint("models") == f"pip install '{installed_name()}[models]'"
    missing = ModuleNotFoundError("No module named 'typer'", name="typer")
    assert missing_package(missing, "cli") == f"needs typer, which is not installed; {install_hint('cli')}."


def test_a_missing_part_of_our_own_is_no_matter_of_installing():
    with pytest.raises(ModuleNotFoundError, match="nystromformer.absent"):
        missing_package(ModuleNotFoundError("nystromformer.absent", name="nystromformer.absent"), "cli")


def named_extras(text: str) -> list[tuple[str, set[str]]]:
    """Each `name[extras]` and each `.[extras]` in a text whose name could be ours.

    >>> named_extras("pip install 'nystromformer[models,cli]' or '.[dev]'") == [
    ...     ("nystromformer", {"models", "cli"}), (".", {"dev"})]
    True
    """
    found = re.findall(r"(nystromformer[\w-]*|(?<=['\"])\.)\[([a-z, ]+)\]", text)
    return [(name, {extra.strip() for extra in extras.split(",")}) for name, extras in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_install_our_distribution_with_extras_that_exist(page):
    text = page.read_text(encoding="utf-8")
    for name, extras in named_extras(text):
        assert name in (installed_name(), "."), f"{page.name}: {name} is not {installed_name()}"
        assert extras <= EXTRAS.keys(), f"{page.name}: no extras {extras - EXTRAS.keys()}"
    for command in re.findall(r"pip install [^`\n]*", text):
        names = set(re.findall(r"\bnystromformer[\w-]*", command))
        assert names <= {installed_name()}, f"{page.name}: installs another package: {command}"


def test_the_readme_says_the_name():
    assert f"`{installed_name()}`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_citation_has_the_version_of_the_package():
    version = metadata.version(installed_name())
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_one_place_builds_install_hints():
    for path in SOURCES:
        strings = [node.value for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if is_text(node)]
        if path != PACKAGE / "errors.py":
            assert not any("pip install" in text for text in strings), f"{path.name}: use errors.install_hint"


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_hints_name_extras_that_exist():
    hinted = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = isinstance(node, ast.Call) and getattr(node.func, "id", None)
            if called in ("install_hint", "missing_package"):
                hinted |= {argument.value for argument in node.args if is_text(argument)}
    assert {"models", "train", "cli", "peers"} == hinted
    assert hinted <= EXTRAS.keys()


@pytest.mark.parametrize("part", sorted({path.relative_to(PACKAGE).parts[0] for path in SOURCES}))
def test_what_is_imported_is_declared(part):
    for path in SOURCES:
        if path.relative_to(PACKAGE).parts[0] == part:
            extras = extras_for(path)
            undeclared = imported_packages(path) - requirements(*extras)
            where = f"the extras {', '.join(extras)}" if extras else "dependencies"
            assert not undeclared, f"{path.relative_to(ROOT)} imports {undeclared}: declare it in {where}"


def test_what_is_declared_is_imported():
    used = set().union(*map(imported_packages, SOURCES))
    declared = requirements("models", "train", "cli", "peers")
    assert declared - used == NOT_IMPORTED.keys()


def test_the_core_needs_torch_alone():
    assert requirements() == {"torch"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, and the wheel made from it, not from the checkout: both have what they need.

    The library of inner loops is in the wheel where this machine has a C compiler, as in the checkout."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(PACKAGE, source / "nystromformer", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "docs", source / "docs")
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, str(folder), cwd=source)
    (sdist,) = folder.glob("*.tar.gz")
    # In a process of its own: extractall's filter, which Python 3.12 warns without, is unknown to 3.11.3.
    run(sys.executable, "-m", "tarfile", "--extract", str(sdist), str(folder / "unpacked"))
    (unpacked,) = (folder / "unpacked").iterdir()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(folder), str(unpacked))
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def bare(built, tmp_path_factory):
    """The Python of an environment with the wheel, torch and what torch needs: no numpy, transformers or typer."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    for distribution in closure("torch"):
        files = metadata.distribution(distribution).files
        for name in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            (packages / name).symlink_to(metadata.distribution(distribution).locate_file(name))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
    run(*pip, "install", "--no-deps", "--no-index", str(built[1]))
    return python


def closure(name: str) -> set[str]:
    """A distribution and all that it needs here."""
    found, waiting = set(), {canonicalize_name(name)}
    while waiting:
        current = waiting.pop()
        found.add(current)
        needed = map(Requirement, metadata.requires(current) or [])
        applies = (need for need in needed if need.marker is None or need.marker.evaluate({"extra": ""}))
        waiting |= {canonicalize_name(need.name) for need in applies} - found
    return found


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.slow(seconds=20)
def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    sdist, wheel = built
    assert sdist.name.startswith(installed_name().replace("-", "_"))
    expected = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file()}
    expected = {name for name in expected if "__pycache__" not in name}
    assert "nystromformer/py.typed" in expected
    guides = {f"share/nystromformer/guides/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    installed = {name.partition(".data/data/")[2] for name in names if ".data/data/" in name}
    assert installed == guides, "what the demo searches"
    assert {name for name in names if ".data/data/" not in name} == expected


@pytest.mark.slow
def test_the_core_works_where_only_torch_is_installed(bare, tmp_path):
    code = """
import importlib.util, torch, nystromformer
from nystromformer import NystromAttention, build_attention, nystrom_attention
for absent in ("numpy", "transformers", "typer", "rich", "safetensors"):
    assert importlib.util.find_spec(absent) is None, absent
query, key, value = torch.randn(3, 2, 4, 100, 16, dtype=torch.float64)
exact = torch.nn.functional.scaled_dot_product_attention(query, key, value)
torch.testing.assert_close(nystrom_attention(query, key, value, num_landmarks=100), exact)
mask = torch.arange(100) < torch.tensor([[100], [70]])
for name in ("nystrom-16", "nystrom-local-16", "standard", "linformer-16", "linear"):
    attention = build_attention(name, num_heads=4, head_dim=16, max_length=100).double()
    assert attention(query, key, value, mask=mask).isfinite().all(), name
layer = NystromAttention(dim=64, num_heads=4, num_landmarks=16)
layer(torch.randn(2, 100, 64), mask=mask).sum().backward()
from nystromformer.models.mil import TransMIL
assert TransMIL(features=16, dim=32, heads=4)(torch.randn(2, 100, 16), mask).shape == (2, 2)
from nystromformer.integrations import nystrom_attention, torchmil, xformers
for name in ("NystromformerModel", "register"):
    try:
        getattr(nystromformer, name)()
    except ImportError as error:
        print(error)
"""
    said = run(str(bare), "-c", code, cwd=tmp_path).stdout.splitlines()
    assert said == [
        f"{name} needs transformers: {install_hint('models')}." for name in ("NystromformerModel", "register")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", [["nystromformer", "--help"], ["python", "-m", "nystromformer", "bench"]])
def test_the_command_without_its_extra_says_what_to_install(command, bare, tmp_path):
    program, *arguments = command
    done = subprocess.run([bare.parent / program, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"nystromformer: needs typer, which is not installed; {install_hint('cli')}.\n"
