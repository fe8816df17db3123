"""Files and folders are whole or absent, and leftovers of processes that are no more are swept."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nystromformer import files
from nystromformer.files import LOCK, aside_of, locked, read_object, remove, sweep, whole_folder, write_text

DEAD = 2**22 + 1
"""No process has this number: Linux counts to 2²²."""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_whole_or_absent(tmp_path):
    path = tmp_path / "folder" / "file.json"
    write_text(path, json.dumps([1]))
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert json.loads(path.read_text()) == [1]
    assert names(path.parent) == ["file.json"]


@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_a_file_that_can_not_be_written_leaves_the_old_one(tmp_path, monkeypatch, operation):
    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_text(tmp_path / "file", "old")
    monkeypatch.setattr(os, operation, no_space)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_contents_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def synced(handle):
        done.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def renamed(source, target):
        done.append(("rename", os.path.basename(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    write_text(tmp_path / "file", "x")
    aside = aside_of(tmp_path / "file").name
    assert done == [("sync", aside), ("rename", "file"), ("sync", tmp_path.name)]
    done.clear()
    with whole_folder(tmp_path / "set") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("a")
    place = done.index(("rename", "set"))
    assert {("sync", "a"), ("sync", "inner"), ("sync", folder.name)} <= set(done[:place])
    assert done[place + 1 :] == [("sync", tmp_path.name)]


def test_a_folder_is_replaced_whole(tmp_path):
    for content in ("old", "new"):
        with whole_folder(tmp_path / "model", replace=True) as folder:
            (folder / "weights").write_text(content)
    assert (tmp_path / "model" / "weights").read_text() == "new"
    assert names(tmp_path) == ["model"]
    with pytest.raises(RuntimeError, match="stop"), whole_folder(tmp_path / "model", replace=True) as folder:
        raise RuntimeError("stop")
    assert (tmp_path / "model" / "weights").read_text() == "new"
    assert names(tmp_path) == ["model"]


def test_of_two_processes_that_write_one_folder_the_second_is_told(tmp_path):
    def written_by_another(folder):
        folder.mkdir()
        (folder / "theirs").write_text("whole")

    with pytest.raises(ValueError, match="set exists and is not an empty folder"), whole_folder(tmp_path / "set"):
        written_by_another(tmp_path / "set")
    assert names(tmp_path / "set") == ["theirs"]
    assert names(tmp_path) == ["set"]


def test_leftovers_of_dead_processes_are_swept_and_those_of_others_are_not(tmp_path):
    alive = os.getppid()
    for name in (f".a.json.{DEAD}.unfinished", f".a.json.{alive}.unfinished", f".b.json.{DEAD}.unfinished"):
        (tmp_path / name).write_text("half")
    (tmp_path / f".a.json.{DEAD}-removed.unfinished").mkdir()
    write_text(tmp_path / "a.json", "{}")
    assert names(tmp_path) == [f".a.json.{alive}.unfinished", f".b.json.{DEAD}.unfinished", "a.json"]
    sweep(tmp_path)  # of a folder that is locked: nobody else writes there
    assert names(tmp_path) == ["a.json"]


def test_removing_what_is_not_there_is_no_error(tmp_path):
    remove(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    remove(tmp_path / "file")
    assert names(tmp_path) == []


def hold(folder):
    """A process that holds the lock of a folder until it is killed."""
    code = (
        "import sys; from pathlib import Path; from nystromformer.files import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_locked_folder_is_refused_until_its_process_is_killed(tmp_path):
    process = hold(tmp_path / "run")
    message = f"run is being written by process {process.pid}: wait until it ends"
    with pytest.raises(ValueError, match=message), locked(tmp_path / "run"):
        pass
    process.kill()
    process.wait()
    with locked(tmp_path / "run"):
        assert (tmp_path / "run" / LOCK).read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("content", [b"[]", b"", b"{", b"\xff", b"\0", b"[" * 100_000, b"1" * 10_000, b"null"])
def test_what_is_no_json_object_is_refused_by_its_name(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config.json: (not JSON|must be a JSON object)"):
        read_object(tmp_path / "config.json")


def test_every_module_writes_files_through_this_one():
    one = Path(files.__file__)
    for path in one.parent.rglob("*.py"):
        if path != one:
            assert "os.replace" not in path.read_text(), path
            assert "os.rename" not in path.read_text(), path
