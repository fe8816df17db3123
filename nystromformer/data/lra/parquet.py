"""Data sets in the Hub's parquet layout, from a folder or by their Hub id."""

import re
from collections.abc import Iterator
from pathlib import Path

from nystromformer.data.lra.tables import nearby

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


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


def download(hub_id: str, out: Path | None = None) -> Path:
    """The parquet files of a data set of the Hub, in `out` or in the Hub's own cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns="*.parquet", local_dir=out))
    except Exception as error:  # the Hub's, the network's and the cache's errors have nothing else in common
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{hub_id}: no such folder, and as a data set of the Hub it can't be had ({reason}); "
            f"download it where the Hub can be reached and give its folder with --data."
        ) from error


def rows_of(folder: Path, part: str, columns: tuple[str, str]) -> Iterator[tuple[str, object, object]]:
    """(where, first column, second column) of each row of all files of a part, such as `plain_text/train-*.parquet`."""
    import pyarrow
    from pyarrow import parquet

    files = sorted(folder.rglob(f"{part}-*.parquet")) or sorted(folder.rglob(f"{part}.parquet"))
    if not files:
        raise ValueError(
            f"{folder}: no {part}-*.parquet in it or in its subfolders; must be a copy of the Hub's data set, but "
            f"{nearby(folder / part)}"
        )
    for path in files:
        try:
            table = parquet.ParquetFile(path)
            missing = set(columns) - set(table.schema_arrow.names)
            if missing:
                raise ValueError(
                    f"{path}: columns {', '.join(table.schema_arrow.names)}; must have {' and '.join(columns)}."
                )
            row = 0
            for batch in table.iter_batches(columns=list(columns)):
                for first, second in zip(*(batch.column(name).to_pylist() for name in columns), strict=True):
                    row += 1
                    yield f"{path}, row {row}", first, second
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path}: not a whole parquet file ({error}); copy it again.") from error


def checked_label(label: object, classes: int, where: str) -> int:
    if not isinstance(label, int) or not 0 <= label < classes:
        raise ValueError(f"{where}: label {label!r}; must be 0 to {classes - 1}: is this the right data set?")
    return label
