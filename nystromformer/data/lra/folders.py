"""Folders of generated data: whole or absent, and known for what they are."""

import json
from pathlib import Path

from nystromformer.files import DESCRIPTION


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
