"""Files and folders that are whole or absent, whenever a process is killed, the power fails or the disk is full.

Everything is written aside under a name of its own, brought to the disk and renamed. What a killed process left aside
is swept by the next one that writes there. Folders may carry checksums of their files, and a folder may be locked.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHECKSUMS = "checksums.json"
"""In a sealed folder: the SHA-256 of each file in it, by its path."""

LOCK = ".lock"
"""In a folder that only one process may write at a time."""

UNFINISHED = ".unfinished"
"""What is being written or removed is called `.NAME.PROCESS.unfinished`."""


def write_text(path: str | Path, text: str) -> None:
    """Write a file that is whole or absent."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """As `write_text`, for anything."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep(path.parent, path.name)
    aside = aside_of(path)
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def whole_folder(out: Path, *, replace: bool = False, checksums: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when everything is written, and nothing if anything fails.

    A folder that is there already is refused unless it is empty or to be replaced.

    >>> import tempfile
    >>> out = Path(tempfile.mkdtemp()) / "set"
    >>> with whole_folder(out, checksums=True) as folder:
    ...     _ = (folder / "a.txt").write_text("a")
    ...     out.exists()
    False
    >>> sorted(path.name for path in out.iterdir()), damage_of(out)
    (['a.txt', 'checksums.json'], None)
    """
    if not replace:
        _refuse_occupied(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    sweep(out.parent, out.name)
    aside = aside_of(out)
    aside.mkdir()
    try:
        yield aside
        if checksums:
            seal(aside)
        if not replace:
            _refuse_occupied(out)  # by another process meanwhile
        install(aside, out)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def seal(folder: Path) -> None:
    """Note the checksums of all files in a folder, by which `damage_of` knows them again."""
    digests = {path.relative_to(folder).as_posix(): _digest(path) for path in sorted(folder.rglob("*"))
               if path.is_file() and path.name != CHECKSUMS}  # fmt: skip
    (folder / CHECKSUMS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")


def damage_of(folder: Path) -> str | None:
    """Why a sealed folder is not what was written; None for one that is. Files that came later do not matter."""
    name = CHECKSUMS
    try:
        noted = read_object(folder / CHECKSUMS)
        if not noted:
            return f"{CHECKSUMS} names no files"
        for name, digest in noted.items():
            if _digest(folder / name) != digest:
                return f"{name} is not what was written"
    except (FileNotFoundError, NotADirectoryError):
        return f"{name} is missing"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def install(aside: Path, out: Path) -> None:
    """Bring a folder to the disk and give it its name; what has the name is removed first."""
    for folder, _, names in os.walk(aside):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(folder))
    remove(out)
    os.replace(aside, out)
    sync_folder(out.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there, so that no half of it ever has its name."""
    aside = aside_of(path, "removed")
    try:
        os.replace(path, aside)
    except FileNotFoundError:
        return
    sync_folder(path.parent)
    _delete(aside)


def sweep(folder: Path, name: str | None = None) -> None:
    """Remove what processes that are no more left aside: for one name or, where this process alone writes, all."""
    if name is not None:
        found = (path for path in folder.glob(f".*{UNFINISHED}") if path.name.startswith(f".{name}."))
    else:
        found = folder.rglob(f".*{UNFINISHED}")
    for path in list(found):
        process = path.name.removesuffix(UNFINISHED).rpartition(".")[2].partition("-")[0]
        if name is None or not (process.isdigit() and _is_alive(int(process))):
            _delete(path)


def aside_of(path: Path, purpose: str = "") -> Path:
    """Where this process writes what becomes `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}{purpose and '-' + purpose}{UNFINISHED}")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    if os.name == "nt":  # which opens no folders, and writes names at once
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder; the system opens the lock when this process ends, however it ends.

    It is a lock of the process (`lockf`), not of the open file (`flock`): workers that were forked do not hold it on.
    """
    import fcntl  # Windows has none, and can do the rest

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            raise ValueError(
                f"{folder} is being written by process {file.read().strip()}: wait until it ends or stop it, or give "
                f"another --out."
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `ValueError` that names the file for anything else in it."""
    try:
        found = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too deep
        raise ValueError(f"{path}: not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a JSON object, but holds a {type(found).__name__}.")
    return found


def _refuse_occupied(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: give another --out, or remove it first.")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    """Whether another process has this number. One of our own number is an earlier one: we have written nothing yet."""
    if process == os.getpid():
        return False
    with suppress(PermissionError):
        try:
            os.kill(process, 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True
