"""Files and folders that are whole or absent: written aside, then renamed."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DESCRIPTION = "dataset.json"
"""Says how a folder was generated and how many examples each part has."""


@contextmanager
def whole_folder(out: Path, description: dict[str, object]) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when everything is written, and nothing if anything fails.

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp()) / "set"
    >>> with whole_folder(out, {"generator": "none"}) as folder:
    ...     _ = (folder / "a.txt").write_text("a")
    ...     out.exists()
    False
    >>> sorted(path.name for path in out.iterdir())
    ['a.txt', 'dataset.json']
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: give another --out, or remove it first.")
    aside = out.parent / f".{out.name}.unfinished"
    shutil.rmtree(aside, ignore_errors=True)  # left by a run that was killed
    aside.mkdir(parents=True)
    try:
        yield aside
        (aside / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        os.replace(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_text(path: str | Path, text: str) -> None:
    """Write a file aside and rename it, so that it is whole or absent."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """As `write_text`, for anything."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(content)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
