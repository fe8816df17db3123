"""Rows of one parquet file, some columns of it."""

from collections.abc import Iterator
from pathlib import Path


def cells_of(
    path: Path, needed: tuple[str, ...] | None, optional: tuple[str, ...] = ()
) -> Iterator[tuple[int, dict[str, object]]]:
    """(row number, cells by column) of a file, `needed` columns and those `optional` ones that are there."""
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(path)
        names = table.schema_arrow.names
        missing = [name for name in needed or () if name not in names]
        if missing:
            raise ValueError(
                f"{path}: columns {', '.join(names)}; must have {', '.join(needed)} ({', '.join(missing)} missing)."
            )
        wanted = names if needed is None else [name for name in names if name in (*needed, *optional)]
        number = 0
        for batch in table.iter_batches(columns=wanted):
            for cells in batch.to_pylist():
                number += 1
                yield number, cells
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: not a whole parquet file ({error}); copy it again.") from error
