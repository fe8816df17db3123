"""Folders of generated data: whole or absent, and known for what they are."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nystromformer.files import read_object, whole_folder

DESCRIPTION = "dataset.json"
"""Says how a folder was generated and how many examples each part has."""


@contextmanager
def described_folder(out: Path, description: dict[str, object]) -> Iterator[Path]:
    """A folder to write data into, which becomes `out` with its description when everything is written."""
    with whole_folder(out) as folder:
        yield folder
        (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def description_of(folder: Path) -> dict[str, object] | None:
    """What `described_folder` noted about a folder; None for one that was not generated here, such as LRA's own."""
    path = folder / DESCRIPTION
    if not path.exists():
        return None
    try:
        description = {"options": {}, "examples": {}, **read_object(path)}
        for name in ("options", "examples"):
            if not isinstance(description[name], dict):
                raise ValueError(f"{path}: {name} must be a JSON object.")
    except ValueError as error:
        raise ValueError(f"{error} Generate the data again.") from error
    return description


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
