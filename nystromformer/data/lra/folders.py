"""Folders of generated data: whole or absent, and known for what they are."""

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


def description_of(folder: Path) -> dict[str, object] | None:
    """What `whole_folder` noted about a folder; None for one that was not generated here, such as LRA's own."""
    path = folder / DESCRIPTION
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error}); generate the data again.") from error


def check_count(folder: Path, file: Path, part: str, found: int) -> None:
    """Refuse a generated file that has lost some of its examples."""
    description = description_of(folder)
    expected = found if description is None else description["examples"].get(part, found)
    if found != expected:
        raise ValueError(
            f"{file}: {found:,} examples, but {folder / DESCRIPTION} promises {expected:,}; the file was cut short: "
            f"copy it again or generate the data again."
        )


def check_options(folder: Path, options: dict[str, object]) -> None:
    """Refuse a folder that was generated with other options."""
    description = description_of(folder) or {"options": {}}
    for name, value in options.items():
        made = description["options"].get(name)
        if made != value:
            raise ValueError(
                f"{folder} was made with {name}={made}, but {value} is wanted: remove it, or give the folder with "
                f"--data if it is meant."
            )
