"""Data sets from a folder or from the Hub, and the rows of the parquet files that they come in.

Complaints name the file, the row and what to do.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PARQUET = ("*.parquet",)


def local_folder(data: str) -> Path:
    """The folder `data`, or the local copy of the Hub's data set of that id, downloaded if it is not there yet."""
    folder = Path(data)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ValueError(f"{data}: a file; must be a folder, or the id of a data set on the Hub.")
    if not HUB_ID.fullmatch(data):
        raise ValueError(f"{data}: no such folder; {nearby(folder)}")
    return download(data)


def download(hub_id: str, out: Path | None = None, patterns: Sequence[str] = PARQUET, option: str = "--data") -> Path:
    """The files of a data set of the Hub that match `patterns`, in `out` or in the Hub's own cache.

    `option` is what the user may give a folder with instead.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=list(patterns), local_dir=out))
    except Exception as error:  # the Hub's, the network's and the cache's errors have nothing else in common
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{hub_id}: no such folder, and as a data set of the Hub it can't be had ({reason}); "
            f"download it where the Hub can be reached and give its folder with {option}."
        ) from error


def parquet_files(folder: Path, part: str) -> list[Path]:
    """The files of a part, such as `plain_text/train-00000-of-00001.parquet`; none where it is missing."""
    return sorted(folder.rglob(f"{part}-*.parquet")) or sorted(folder.rglob(f"{part}.parquet"))


def parquet_rows(
    path: Path, needed: tuple[str, ...] | None = None, optional: tuple[str, ...] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number, cells by column) of a file: `needed` columns and those `optional` ones that are there; None: all."""
    import pyarrow
    from pyarrow import parquet

    check_regular_file(path)
    try:
        table = parquet.ParquetFile(path)
        names = table.schema_arrow.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path}: column {twice!r} is there twice; rename or remove one of them.")
        missing = [name for name in needed or () if name not in names]
        if missing:
            raise ValueError(
                f"{path}: columns {', '.join(names)}; must have {', '.join(needed or ())} ({', '.join(missing)} "
                f"missing)."
            )
        wanted = names if needed is None else [name for name in names if name in (*needed, *optional)]
        number = 0
        for batch in table.iter_batches(columns=wanted):
            for cells in batch.to_pylist():
                number += 1
                yield number, cells
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a whole parquet file ({error}); copy it again.") from error


def check_regular_file(path: Path) -> None:
    """Refuse what is no file, or one that never ends, such as a pipe."""
    if path.is_file():
        return
    if path.exists():
        raise ValueError(f"{path}: a {'folder' if path.is_dir() else 'pipe or device'}; must be a regular file.")
    raise ValueError(f"{path}: no such file; {nearby(path)}")


def nearby(path: Path) -> str:
    """What is there instead of a missing file, to guess the mistake from."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either."
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    listed = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
    return f"{folder} holds {listed or 'nothing'}."
