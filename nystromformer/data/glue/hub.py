"""GLUE and IMDB as the Hub has them: parquet files such as `sst2/validation-00000-of-00001.parquet`."""

from collections.abc import Iterator
from pathlib import Path

from nystromformer.data.glue.parquet import cells_of
from nystromformer.data.glue.tasks import Task
from nystromformer.data.glue.texts import Row, Texts, TextSplits, collect
from nystromformer.data.lra.tables import nearby

HIDDEN = -1
"""The label of examples whose label is not published."""
DEV_SHARE = 0.1
"""Of the training part, held out where there is no development part."""


def read(folder: Path, task: Task) -> TextSplits:
    """All parts. Test parts may be missing; IMDB's has labels, GLUE's have none."""
    train = read_part(folder, "train", task)
    dev = {name: read_part(folder, part, task) for name, part in task.dev.items()}
    if not dev:
        train, dev["dev"] = train.hold_out(DEV_SHARE)
    test = {name: read_part(folder, part, task, True) for name, part in task.test.items() if files_of(folder, part)}
    return TextSplits(train, dev, test, task.labels)


def files_of(folder: Path, part: str) -> list[Path]:
    return sorted(folder.rglob(f"{part}-*.parquet")) or sorted(folder.rglob(f"{part}.parquet"))


def read_part(folder: Path, part: str, task: Task, is_test: bool = False) -> Texts:
    files = files_of(folder, part)
    if not files:
        raise ValueError(
            f"{folder}: no {part}-*.parquet in it or in its subfolders; must be a copy of {task.title} from the Hub, "
            f"or the official files: {nearby(folder / part)}"
        )
    texts = collect(rows_of(files, task, is_test), task.hub.texts, task.labels, allow_empty=task.has_damage)
    if not len(texts):
        raise ValueError(f"{files[0]}: no rows; copy it again.")
    return texts


def rows_of(files: list[Path], task: Task, is_test: bool) -> Iterator[Row]:
    columns, hidden = task.hub, None
    for path in files:
        needed = (*columns.texts, *(() if is_test else (columns.label,)))
        for number, cells in cells_of(path, needed, optional=("idx", columns.label)):
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
