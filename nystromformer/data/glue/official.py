"""GLUE's official files: `SST-2/train.tsv`, `dev.tsv`, `test.tsv` and so on.

Fields are separated by tabs and never quoted: a lone quotation mark is text. Headers differ from task to task and from
part to part, so columns are found by name. Some files start with a byte order mark.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from nystromformer.data.glue.tasks import Columns, Task
from nystromformer.data.glue.texts import Row, Texts, TextSplits, collect
from nystromformer.data.lra.tables import nearby

TRAIN = "train"
INDEX = ("index", "id")
"""Columns that number the examples of a test part."""


def is_official(folder: Path) -> bool:
    return any(folder.glob("*.tsv"))


def read(folder: Path, task: Task) -> TextSplits:
    """All parts. Test parts have no labels and may be missing."""
    return TextSplits(
        train=read_part(folder / f"{TRAIN}.tsv", task),
        dev={name: read_part(folder / f"{name}.tsv", task) for name in task.dev},
        test={
            name: read_part(folder / f"{name}.tsv", task, is_test=True)
            for name in task.test
            if (folder / f"{name}.tsv").is_file()
        },
        labels=task.labels,
    )


def read_part(path: Path, task: Task, is_test: bool = False) -> Texts:
    damaged: list[int] = []
    rows = rows_of(path, task, is_test, damaged)
    texts = collect(rows, task.official.texts, task.labels, allow_empty=task.has_damage)
    if not len(texts):
        raise ValueError(f"{path}: no rows; the file was cut short: copy it again.")
    return replace(texts, left_out=len(damaged))


def rows_of(path: Path, task: Task, is_test: bool, damaged: list[int]) -> Iterator[Row]:
    """The rows of a file. Numbers of lines that are left out as damaged go to `damaged`."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {nearby(path)}")
    columns = task.official
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
                    check_header(path, header, columns, is_test)
                    continue
                if len(fields) != len(header):
                    if task.has_damage and not is_test:
                        damaged.append(number)
                        continue
                    raise ValueError(
                        f"{path}, line {number}: {len(fields)} columns; must be the {len(header)} that are separated "
                        f"by tabs ({', '.join(header)}): mend or remove the line."
                    )
                cells = dict(zip(header, fields, strict=True))
                index = next((cells[name] for name in INDEX if name in cells), str(number))
                label = None if is_test else cells[columns.label]
                yield Row(f"{path}, line {number}", index, tuple(cells[name] for name in columns.texts), label)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error}); save it as UTF-8, or copy it again.") from error


def check_header(path: Path, header: tuple[str, ...], columns: Columns, is_test: bool) -> None:
    needed = columns.texts if is_test else (*columns.texts, columns.label)
    missing = [name for name in needed if name not in header]
    if missing:
        raise ValueError(
            f"{path}, line 1: columns {', '.join(header)[:200]}; must have {', '.join(needed)} ({', '.join(missing)} "
            f"missing): is it the official file of this task, with its header?"
        )
