"""The records of runs, found at any depth below the folders that were given."""

from collections.abc import Iterable
from pathlib import Path

from nystromformer.records import RECORDS, read_records

Record = dict[str, object]
FOLDER = "folder"
"""What a record is given here: where it was found, and where the files are that it names."""


def read_runs(runs: Iterable[Path]) -> list[Record]:
    """All records below `runs`. `ValueError` for a folder that holds none; what is no record of a job is left out."""
    folders: dict[Path, None] = {}
    for run in runs:
        found = sorted(path.parent for path in run.rglob(RECORDS)) if run.is_dir() else []
        if not found:
            raise ValueError(f"{run}: holds no {RECORDS}; give the --out folder of a finished job.")
        folders |= dict.fromkeys(found)
    return [
        record | {FOLDER: str(folder)}
        for folder in folders
        for record in read_records(folder)
        if isinstance(record, dict)
        and {"job", "config", "metric", "value"} <= record.keys()
        and isinstance(record["config"], dict)
    ]
