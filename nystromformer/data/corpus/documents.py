"""Documents of one file. Every complaint names the file, the place and what to do."""

import gzip
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from nystromformer.data.corpus.sources import COMPRESSED, kind_of

DIVISIONS = ("blank-line", "line", "file")
"""What divides a text file into documents. "blank-line" is BERT's format."""
ROWS = 256
"""Rows of a parquet file that are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files are understood."""

    text_column: str = "text"
    """The column of parquet files and JSON lines that holds the document."""
    division: str = "blank-line"

    def __post_init__(self) -> None:
        if self.division not in DIVISIONS:
            raise ValueError(f"--documents {self.division}: must be one of {', '.join(DIVISIONS)}.")


def documents(path: Path, reading: Reading) -> Iterator[tuple[str, float]]:
    """(text, share of the file that is read) for each document; empty ones are left out."""
    read = {".parquet": _parquet, ".txt": _text}.get(kind_of(path), _json_lines)
    try:
        for text, share in read(path, reading):
            if text and not text.isspace():
                # a lone surrogate, which JSON can hold, has no place in UTF-8
                yield text.encode("utf-8", errors="replace").decode("utf-8"), share
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: can't be read ({error}); copy it again.") from error


def _parquet(path: Path, reading: Reading) -> Iterator[tuple[str, float]]:
    import pyarrow
    from pyarrow import parquet

    column = reading.text_column
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise ValueError(f"{path}: columns {', '.join(names)}, but no {column!r}; name one with --text-column.")
            total, row = table.metadata.num_rows, 0
            for batch in table.iter_batches(batch_size=ROWS, columns=[column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield _checked(text, f"{path}, row {row}", column), row / total
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole parquet file ({error}); copy it again.") from error


def _json_lines(path: Path, reading: Reading) -> Iterator[tuple[str, float]]:
    for number, line, share in _lines(path):
        if not line:
            continue
        where, column = f"{path}, line {number}", reading.text_column
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error}); must be one JSON object a line.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a JSON {type(row).__name__}; must be one JSON object a line.")
        if column not in row:
            raise ValueError(f"{where}: fields {', '.join(row)}, but no {column!r}; name one with --text-column.")
        yield _checked(row[column], where, column), share


def _text(path: Path, reading: Reading) -> Iterator[tuple[str, float]]:
    lines: list[str] = []
    share = 0.0
    for _, line, share in _lines(path):
        lines.append(line)
        if reading.division == "line" or (reading.division == "blank-line" and not line):
            yield "\n".join(lines).strip(), share
            lines = []
    yield "\n".join(lines), share


def _lines(path: Path) -> Iterator[tuple[int, str, float]]:
    """(number, line without its end, share of the file that is read)"""
    size = max(path.stat().st_size, 1)
    is_compressed = path.suffix.lower() == COMPRESSED
    with open(path, "rb") as raw, gzip.GzipFile(fileobj=raw) if is_compressed else nullcontext(raw) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not text in UTF-8 ({error.reason} at byte {error.start}); convert the "
                    f"file to UTF-8, or leave it out."
                ) from error
            if "\0" in text:
                raise ValueError(f"{path}, line {number}: not text (it has a NUL byte); leave the file out.")
            yield number, text.strip(), min(raw.tell() / size, 1.0)


def _checked(text: object, where: str, column: str) -> str:
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: {column!r} holds a {type(text).__name__}; must be text, see --text-column.")
    return text or ""
