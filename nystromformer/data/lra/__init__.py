"""Long Range Arena: five tasks, all read into the same `Splits`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nystromformer.data.hub import download
from nystromformer.data.lra import listops, pathfinder
from nystromformer.data.lra.examples import Examples, Splits, as_is, described_folder
from nystromformer.data.lra.readers import read_image, read_retrieval, read_text

__all__ = ["TASKS", "Examples", "Splits", "Task", "as_is", "fetch", "task_folder"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model and a reader need to know."""

    title: str
    read: Callable[..., Splits]
    """read(folder, max_length)"""
    classes: int
    vocabulary: int
    """Ids, with padding. ListOps has 16; the paper's table has room for 32."""
    pair: bool = False
    side: int | None = None
    """Of the square picture whose pixels the tokens are, row by row, and their ids its levels of gray."""
    masked: float = 0.15
    """The share of tokens that self-pretraining masks. Neighbors tell a pixel sooner than a letter: half of them."""
    hub_id: str | None = None
    """Where the data set is on the Hub."""
    folders: tuple[str, ...] = ()
    """Names that its folder may have beside the task's own."""
    source: str = ""
    """What to do without data."""


BYTES = 1 + 256
GENERATED = "make it with: nystromformer lra-data {name} --out DIR"
TASKS: dict[str, Task] = {
    "listops": Task(title="ListOps", read=listops.read, classes=10, vocabulary=32, source=GENERATED),
    "text": Task(
        title="Text", read=read_text, classes=2, vocabulary=BYTES, hub_id="stanfordnlp/imdb", folders=("imdb",)
    ),
    "retrieval": Task(
        title="Retrieval",
        read=read_retrieval,
        classes=2,
        vocabulary=BYTES,
        pair=True,
        folders=("aan",),
        source="take new_aan_pairs.{{train,eval,test}}.tsv of LRA's release (lra_release.gz, folder tsv_data)",
    ),
    "image": Task(
        title="Image",
        read=read_image,
        classes=10,
        vocabulary=BYTES,
        side=32,
        masked=0.5,
        hub_id="uoft-cs/cifar10",
        folders=("cifar10",),
    ),
    "pathfinder": Task(
        title="Pathfinder",
        read=pathfinder.read,
        classes=2,
        vocabulary=BYTES,
        side=32,
        masked=0.5,
        source=GENERATED,
    ),
}
"""In the order of the paper's table."""


def task_folder(root: Path, name: str) -> Path | None:
    """The folder of a task inside a folder of all tasks, by its own name or the data set's."""
    candidates = [root / folder for folder in (name, *TASKS[name].folders)]
    return next((folder for folder in candidates if folder.is_dir()), None)


def fetch(name: str, out: Path) -> None:
    """Copy a task's data set from the Hub into the folder `out`."""
    task = TASKS[name]
    if task.hub_id is None:
        raise ValueError(f"{name} is not on the Hub: {task.source.format(name=name)}.")
    with described_folder(out, {"task": name, "hub_id": task.hub_id, "examples": {}}) as folder:
        download(task.hub_id, folder)
