"""The user's own texts: CSV, TSV, JSON lines or parquet, with columns of any names.

One file, of which a tenth is held out for development, or a folder with `train.*`, `dev.*` (or `validation.*`) and
`test.*`; the last two may be missing, and a test file without labels is predicted.
"""

import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path

from nystromformer.data.glue.hub import DEV_SHARE
from nystromformer.data.glue.parquet import cells_of
from nystromformer.data.glue.tasks import Columns
from nystromformer.data.glue.texts import Row, Texts, TextSplits, collect, shown
from nystromformer.data.lra.tables import nearby

KINDS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
PARTS = {"train": ("train",), "dev": ("dev", "validation", "valid", "val"), "test": ("test",)}
MOST_CLASSES = 1_000
"""More different labels than this are a mistake in the choice of the column."""
LONGEST_FIELD = 2**27
"""Of a CSV file, in characters; Python's own limit of 131,072 is less than a long document."""


def read(source: Path, columns: Columns) -> TextSplits:
    """Labels become classes in alphabetical order, or numbers where some of them are not whole numbers."""
    files = parts_of(source)
    train_rows = list(rows_of(files["train"], columns, is_test=False))
    labels = class_names(files["train"], train_rows)
    train = collect(train_rows, columns.texts, labels)
    if "dev" in files:
        dev = read_part(files["dev"], columns, labels)
    else:
        train, dev = train.hold_out(DEV_SHARE)
    test = {"test": read_part(files["test"], columns, labels, is_test=True)} if "test" in files else {}
    return TextSplits(train, {"dev": dev}, test, labels)


def parts_of(source: Path) -> dict[str, Path]:
    if source.is_file():
        check_kind(source)
        return {"train": source}
    if not source.is_dir():
        raise ValueError(f"{source}: no such file or folder; {nearby(source)}")
    found: dict[str, Path] = {}
    for part, names in PARTS.items():
        candidates = [path for path in sorted(source.iterdir()) if path.stem in names and path.suffix in KINDS]
        if len(candidates) > 1:
            given = ", ".join(path.name for path in candidates)
            raise ValueError(f"{source}: {given} are all the {part} part; leave one of them in the folder.")
        if candidates:
            found[part] = candidates[0]
    if "train" not in found:
        raise ValueError(f"{source}: no train file ({', '.join('train' + kind for kind in KINDS)}); "
                         f"{nearby(source / 'train')}")  # fmt: skip
    return found


def check_kind(path: Path) -> None:
    if path.suffix not in KINDS:
        raise ValueError(f"{path}: must be one of {', '.join(KINDS)}; save it as one of these.")


def read_part(path: Path, columns: Columns, labels: tuple[str, ...] | None, is_test: bool = False) -> Texts:
    return collect(rows_of(path, columns, is_test), columns.texts, labels)


def rows_of(path: Path, columns: Columns, is_test: bool) -> Iterator[Row]:
    """The rows of a file; of a test part without the label column, too."""
    needed = (*columns.texts, columns.label)
    number = 0
    for number, (where, cells) in enumerate(READERS[path.suffix](path), start=1):
        if number == 1 and is_test and columns.label not in cells:
            needed = columns.texts
        missing = [name for name in needed if name not in cells]
        if missing:
            raise ValueError(
                f"{path}, {where}: columns {', '.join(map(str, cells))}; must have {', '.join(needed)} "
                f"({', '.join(missing)} missing): name them with --text-column, --pair-column and --label-column."
            )
        label = cells[columns.label] if columns.label in needed else None
        if columns.label in needed and (label is None or label == ""):
            raise ValueError(f"{path}, {where}: column {columns.label} is empty; give the row a label or remove it.")
        yield Row(f"{path}, {where}", str(number - 1), tuple(cells[name] for name in columns.texts), _plain(label))
    if not number:
        raise ValueError(f"{path}: no rows; the file was cut short: copy it again.")


def class_names(path: Path, rows: list[Row]) -> tuple[str, ...] | None:
    """The classes of a part; None where its labels are numbers, not all of them whole.

    >>> rows = [Row("", "", (), label) for label in ("2", "10", "2")]
    >>> class_names(Path("a.csv"), rows)
    ('2', '10')
    >>> class_names(Path("a.csv"), [Row("", "", (), "0.5"), Row("", "", (), "1")])
    """
    names = dict.fromkeys(str(row.label) for row in rows)
    numbers = [_number(name) for name in names]
    if None not in numbers:
        if any(number != int(number) for number in numbers):
            return None
        names = dict(sorted(zip(names, numbers, strict=True), key=lambda item: item[1]))
    else:
        names = dict.fromkeys(sorted(names))
    if not 2 <= len(names) <= MOST_CLASSES:
        raise ValueError(
            f"{path}: {len(names)} different labels, such as {shown(next(iter(names)))}; must be 2 to "
            f"{MOST_CLASSES:,} classes: is --label-column the right column?"
        )
    return tuple(names)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _plain(label: object) -> object:
    """Class numbers of the user's files are names: only the table of classes says which class they are."""
    return str(label).strip() if isinstance(label, (int, str)) else label


def csv_cells(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            for cells in reader:
                if None in cells or None in cells.values():
                    raise ValueError(
                        f"{path}, line {reader.line_num}: another number of columns than the header's "
                        f"{len(reader.fieldnames)} ({', '.join(reader.fieldnames)}): quote texts that contain the "
                        f"separator, or remove the line."
                    )
                yield f"line {reader.line_num}", cells
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}; mend its quotation marks.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); save it as UTF-8.") from error
    finally:
        csv.field_size_limit(before)


def json_cells(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                cells = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); must be one object a line.") from error
            if not isinstance(cells, dict):
                raise ValueError(f"{path}, line {number}: {shown(cells)}; must be an object with columns.")
            yield f"line {number}", cells


def parquet_cells(path: Path) -> Iterator[tuple[str, dict[str, object]]]:
    for number, cells in cells_of(path, None):
        yield f"row {number}", cells


READERS = {
    ".csv": csv_cells,
    ".tsv": csv_cells,
    ".jsonl": json_cells,
    ".json": json_cells,
    ".parquet": parquet_cells,
}
