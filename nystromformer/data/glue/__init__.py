"""GLUE, IMDB and the user's own texts, all read into the same `TextSplits`."""

from pathlib import Path

from nystromformer.data.glue import files, hub, official
from nystromformer.data.glue.tasks import CUSTOM, TASKS, Columns, Task, task_name
from nystromformer.data.glue.texts import Texts, TextSplits
from nystromformer.data.lra.parquet import local_folder

__all__ = ["CUSTOM", "TASKS", "Columns", "Task", "TextSplits", "Texts", "read_custom", "read_task", "task_name"]


def read_task(name: str, data: str = "") -> TextSplits:
    """A task of the table from a folder in the official or the Hub's layout, or from the Hub.

    The folder may be the task's own or hold those of all tasks.
    """
    task = TASKS[name]
    folder = task_folder(local_folder(data or task.hub_id), name)
    if task.official is not None and official.is_official(folder):
        return official.read(folder, task)
    return hub.read(folder, task)


def read_custom(source: str, columns: Columns) -> TextSplits:
    """The user's own file or folder of files."""
    return files.read(Path(source), columns)


def task_folder(root: Path, name: str) -> Path:
    """The folder of a task inside a folder of all tasks, by any of its names; `root` itself if there is none."""
    names = dict.fromkeys((TASKS[name].folder, name))
    places = [place / inner for place in (root, root / "glue") for inner in names]
    return next((folder for folder in places if folder.is_dir()), root)
