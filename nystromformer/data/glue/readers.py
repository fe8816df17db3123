"""Readers of GLUE, IMDB and the user's own texts, each of which gives the same `TextSplits`.

Three layouts: GLUE's official files, the Hub's parquet files, and files of any columns that the user names.
"""

import csv
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nystromformer.data.glue.tasks import TASKS, Columns, Row, Task, Texts, TextSplits, collect, shown
from nystromformer.data.hub import check_regular_file, local_folder, nearby, parquet_files, parquet_rows

DEV_SHARE = 0.1
"""Of the training part, held out where there is no development part."""
INDEX = ("index", "id")
"""Columns that number the examples of an official test part."""
HIDDEN = -1
"""The Hub's label of examples whose label is not published."""
KINDS = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
"""Suffixes of the user's own files."""
PARTS = {"train": ("train",), "dev": ("dev", "validation", "valid", "val"), "test": ("test",)}
"""Names that the user's files may have in a folder, without their suffix."""
MOST_CLASSES = 1_000
"""More different labels than this are a mistake in the choice of the column."""
LONGEST_FIELD = 2**27
"""Of a CSV file, in characters; Python's own limit of 131,072 is less than a long document."""


def read_task(name: str, data: str = "") -> TextSplits:
    """A task of the table from a folder in the official or the Hub's layout, or from the Hub.

    The folder may be the task's own or hold those of all tasks.
    """
    task = TASKS[name]
    folder = task_folder(local_folder(data or task.hub_id), name)
    if task.official is not None and any(folder.glob("*.tsv")):
        return read_official(folder, task, task.official)
    return read_hub(folder, task)


def task_folder(root: Path, name: str) -> Path:
    """The folder of a task inside a folder of all tasks, by any of its names; `root` itself if there is none."""
    names = dict.fromkeys((TASKS[name].folder, name))
    places = [place / inner for place in (root, root / "glue") for inner in names]
    return next((folder for folder in places if folder.is_dir()), root)


def read_official(folder: Path, task: Task, columns: Columns) -> TextSplits:
    """GLUE's official files: `SST-2/train.tsv`, `dev.tsv`, `test.tsv` and so on. Test parts may be missing.

    Fields are separated by tabs and never quoted: a lone quotation mark is text. Headers differ from task to task and
    from part to part, so columns are found by name. Some files start with a byte order mark.
    """
    return TextSplits(
        train=official_part(folder / "train.tsv", task, columns),
        dev={name: official_part(folder / f"{name}.tsv", task, columns) for name in task.dev},
        test={
            name: official_part(folder / f"{name}.tsv", task, columns, is_test=True)
            for name in task.test
            if (folder / f"{name}.tsv").is_file()
        },
        labels=task.labels,
    )


def official_part(path: Path, task: Task, columns: Columns, is_test: bool = False) -> Texts:
    damaged: list[int] = []
    rows = _official_rows(path, task, columns, is_test, damaged)
    texts = collect(rows, columns.texts, task.labels, allow_empty=task.has_damage)
    if not len(texts):
        raise ValueError(f"{path}: no rows; the file was cut short: copy it again.")
    return replace(texts, left_out=len(damaged))


def _official_rows(path: Path, task: Task, columns: Columns, is_test: bool, damaged: list[int]) -> Iterator[Row]:
    """The rows of a file. Numbers of lines that are left out as damaged go to `damaged`."""
    check_regular_file(path)
    header: tuple[str, ...] = ()
    if task.headerless and not is_test:
        header = task.headerless
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        try:
            # only \n ends a line here: texts contain the other characters that Python would split at
            for number, line in enumerate(file, start=1):
                fields = line.rstrip("\r\n").split("\t")
                if not header:
                    header = tuple(name.strip() for name in fields)
                    _check_header(path, header, columns, is_test)
                    continue
                if len(fields) != len(header):
                    if task.has_damage and not is_test:
                        damaged.append(number)
                        continue
                    raise ValueError(
                        f"{path}, line {number}: {len(fields)} columns; must be the {len(header)} that are separated "
                        f"by tabs ({', '.join(header)}): fix or remove the line."
                    )
                cells = dict(zip(header, fields, strict=True))
                index = next((cells[name] for name in INDEX if name in cells), str(number))
                label = None if is_test else cells[columns.label]
                yield Row(f"{path}, line {number}", index, tuple(cells[name] for name in columns.texts), label)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error}); save it as UTF-8, or copy it again.") from error


def _check_header(path: Path, header: tuple[str, ...], columns: Columns, is_test: bool) -> None:
    needed = columns.texts if is_test else (*columns.texts, columns.label)
    missing = [name for name in needed if name not in header]
    if missing:
        raise ValueError(
            f"{path}, line 1: columns {', '.join(header)[:200]}; must have {', '.join(needed)} ({', '.join(missing)} "
            f"missing): is it the official file of this task, with its header?"
        )


def read_hub(folder: Path, task: Task) -> TextSplits:
    """GLUE and IMDB as the Hub has them: parquet files such as `sst2/validation-00000-of-00001.parquet`.

    Test parts may be missing; IMDB's has labels, GLUE's have none.
    """
    train = _hub_part(folder, "train", task)
    dev = {name: _hub_part(folder, part, task) for name, part in task.dev.items()}
    if not dev:
        train, dev["dev"] = train.hold_out(DEV_SHARE)
    test = {
        name: _hub_part(folder, part, task, True) for name, part in task.test.items() if parquet_files(folder, part)
    }
    return TextSplits(train, dev, test, task.labels)


def _hub_part(folder: Path, part: str, task: Task, is_test: bool = False) -> Texts:
    files = parquet_files(folder, part)
    if not files:
        raise ValueError(
            f"{folder}: no {part}-*.parquet in it or in its subfolders; must be a copy of {task.title} from the Hub, "
            f"or the official files: {nearby(folder / part)}"
        )
    texts = collect(_hub_rows(files, task, is_test), task.hub.texts, task.labels, allow_empty=task.has_damage)
    if not len(texts):
        raise ValueError(f"{files[0]}: no rows; copy it again.")
    return texts


def _hub_rows(files: list[Path], task: Task, is_test: bool) -> Iterator[Row]:
    columns, hidden = task.hub, None
    for path in files:
        needed = (*columns.texts, *(() if is_test else (columns.label,)))
        for number, cells in parquet_rows(path, needed, optional=("idx", columns.label)):
            label, where = cells.get(columns.label), f"{path}, row {number}"
            if is_test:
                is_hidden = label in (None, HIDDEN)
                hidden = is_hidden if hidden is None else hidden
                if is_hidden != hidden:
                    raise ValueError(f"{where}: label {label!r}; all rows of a test part must have labels, or none.")
                label = None if is_hidden else label
            elif label is None:
                raise ValueError(f"{where}: no label; remove the row.")
            yield Row(where, str(cells.get("idx", number - 1)), tuple(cells[name] for name in columns.texts), label)


def read_custom(source: str, columns: Columns) -> TextSplits:
    """The user's own texts: CSV, TSV, JSON lines or parquet, with columns of any names.

    One file, of which a tenth is held out for development, or a folder with `train.*`, `dev.*` (or `validation.*`) and
    `test.*`; the last two may be missing, and a test file without labels is predicted. Labels become classes in
    alphabetical order, or numbers where some of them are not whole numbers.
    """
    files = _parts_of(Path(source))
    train_rows = list(_custom_rows(files["train"], columns, is_test=False))
    labels = class_names(files["train"], train_rows)
    train = collect(train_rows, columns.texts, labels)
    if "dev" in files:
        dev = _custom_part(files["dev"], columns, labels)
    else:
        train, dev = train.hold_out(DEV_SHARE)
    test = {"test": _custom_part(files["test"], columns, labels, is_test=True)} if "test" in files else {}
    return TextSplits(train, {"dev": dev}, test, labels)


def _parts_of(source: Path) -> dict[str, Path]:
    if source.is_file():
        _check_kind(source)
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
            check_regular_file(candidates[0])
            found[part] = candidates[0]
    if "train" not in found:
        raise ValueError(f"{source}: no train file ({', '.join('train' + kind for kind in KINDS)}); "
                         f"{nearby(source / 'train')}")  # fmt: skip
    return found


def _check_kind(path: Path) -> None:
    if path.suffix not in KINDS:
        raise ValueError(f"{path}: must be one of {', '.join(KINDS)}; save it as one of these.")


def _custom_part(path: Path, columns: Columns, labels: tuple[str, ...] | None, is_test: bool = False) -> Texts:
    return collect(_custom_rows(path, columns, is_test), columns.texts, labels)


def _custom_rows(path: Path, columns: Columns, is_test: bool) -> Iterator[Row]:
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
        where = f"{path}, {where}"
        label = _plain(cells[columns.label], where) if columns.label in needed else None
        if columns.label in needed and (label is None or label == ""):
            raise ValueError(f"{where}: column {columns.label} is empty; give the row a label or remove it.")
        yield Row(where, str(number - 1), tuple(cells[name] for name in columns.texts), label)
    if not number:
        raise ValueError(f"{path}: no rows; the file was cut short: copy it again.")


def class_names(path: Path, rows: list[Row]) -> tuple[str, ...] | None:
    """The classes of a part; None where its labels are numbers, not all of them whole.

    >>> rows = [Row("", "", (), label) for label in ("2", "10", "2")]
    >>> class_names(Path("a.csv"), rows)
    ('2', '10')
    >>> class_names(Path("a.csv"), [Row("", "", (), "0.5"), Row("", "", (), "1")])
    """
    found = {str(row.label): _number(row.label) for row in rows}
    numbers = {name: number for name, number in found.items() if number is not None}
    if len(numbers) == len(found):
        if any(number != math.floor(number) for number in numbers.values() if math.isfinite(number)):
            return None  # `collect` refuses those that are not finite, and names their rows
        for row in rows:
            if not math.isfinite(numbers[str(row.label)]):
                raise ValueError(f"{row.where}: label {shown(row.label)} among numbers; fix or remove the row.")
        names = tuple(sorted(numbers, key=lambda name: numbers[name]))
    else:
        names = tuple(sorted(found))
    if not 2 <= len(names) <= MOST_CLASSES:
        raise ValueError(
            f"{path}: {len(names)} different labels, such as {shown(names[0])}; must be 2 to "
            f"{MOST_CLASSES:,} classes: is --label-column the right column?"
        )
    return names


def _number(label: object) -> float | None:
    """What a label is as a number, infinite and not-a-number included; None for other texts."""
    try:
        return float(str(label))
    except ValueError:
        return None


def _plain(label: object, where: str) -> object:
    """Class numbers of the user's files are names: only the table of classes says which class they are."""
    if label is not None and not isinstance(label, (str, int, float)):
        raise ValueError(f"{where}: label {shown(label)}; must be one text or number: is this the right column?")
    return str(label).strip() if isinstance(label, (int, str)) else label


def _distinct(path: Path, where: str, names: Iterable[str]) -> None:
    """Refuse columns of one name, of which all but one would be lost."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{path}, {where}: column {shown(twice[0])} is there twice; rename or remove one of them.")


def csv_cells(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    before = csv.field_size_limit(LONGEST_FIELD)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            header = list(reader.fieldnames or ())
            _distinct(path, "line 1", header)
            for cells in reader:
                if None in cells or None in cells.values():
                    raise ValueError(
                        f"{path}, line {reader.line_num}: another number of columns than the header's "
                        f"{len(header)} ({', '.join(header)}): quote texts that contain the "
                        f"separator, or remove the line."
                    )
                yield f"line {reader.line_num}", cells
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}; fix its quotation marks.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}); save it as UTF-8.") from error
    finally:
        csv.field_size_limit(before)


def json_cells(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                cells = json.loads(line, object_pairs_hook=partial(_object, path, f"line {number}"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}); must be one object per line.") from error
            except RecursionError as error:
                raise ValueError(f"{path}, line {number}: nested too deeply; must be a plain object.") from error
            if not isinstance(cells, dict):
                raise ValueError(f"{path}, line {number}: {shown(cells)}; must be an object with columns.")
            yield f"line {number}", cells


def _object(path: Path, where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _distinct(path, where, (name for name, _ in pairs))
    return dict(pairs)


def parquet_cells(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, cells in parquet_rows(path):
        yield f"row {number}", cells


READERS = {
    ".csv": csv_cells,
    ".tsv": csv_cells,
    ".jsonl": json_cells,
    ".json": json_cells,
    ".parquet": parquet_cells,
}
