"""Records: one JSON object per measurement, in `records.jsonl` of each job's folder. Reports read nothing else.

A line is written whole or not at all: what a kill cut short is dropped by the next line, and left out by who reads.
"""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from nystromformer import __version__
from nystromformer.files import read_object, sync_folder, write_text

RECORDS = "records.jsonl"

CONFIG = "config.json"
"""What was asked for, in each job's folder."""

RESULTS = {
    "lra": "test_accuracy",
    "self-pretrain": "masked_accuracy",
    "finetune": "score",
    "pretrain": "mlm_accuracy",
    "distill": "cosine",
}
"""The metric of the record that a finished run of a training job ends with."""

REPORTED_VERSIONS = ("torch", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python, of this package and of those that shape a result, as far as they are installed."""
    found = {"python": platform.python_version(), "nystromformer": __version__}
    for name in REPORTED_VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """What the measurement ran on."""
    import torch

    from nystromformer.attention.native import instructions

    found: dict[str, Any] = {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "native": instructions(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def machine_text(machine: dict[str, Any]) -> str:
    """What `machine` found, in few words.

    >>> machine_text({"processor": "a processor", "cores": 4, "threads": 2, "gpu": "a GPU"}), machine_text({})
    ('a GPU, 2 of 4 cores', '')
    """
    named = machine.get("gpu") or machine.get("processor") or ""
    cores = f"{machine['threads']} of {machine['cores']} cores" if {"threads", "cores"} <= machine.keys() else ""
    return ", ".join(part for part in (named, cores) if part)


def command() -> str:
    """The command line that is running, as one would type it again."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        name = f"python -m {program.parent.name}"
    else:
        name = f"python {os.path.relpath(program)}" if program.suffix == ".py" else program.name
    return " ".join([name, shlex.join(sys.argv[1:])]).strip()


class Recorder:
    """Appends records of one job to its folder, and each is on the disk before anything else is done.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> Recorder(folder, job="bench", config={"length": 512}).record("time", 1.5, unit="ms")
    >>> [(r["job"], r["metric"], r["value"], r["unit"]) for r in read_records(folder)]
    [('bench', 'time', 1.5, 'ms')]
    """

    def __init__(self, folder: str | Path, *, job: str, config: dict[str, Any], seed: int | None = None) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.common = {
            "job": job,
            "config": config,
            "seed": seed,
            "command": command(),
            "versions": versions(),
            "machine": machine(),
        }

    def record(self, metric: str, value: object, **details: Any) -> None:
        _append(self.folder / RECORDS, _line({**self.common, "metric": metric, "value": value, **details}))


def new_job_folder(folder: str | Path) -> None:
    """Make the folder of a new job; one that holds another job's records already is refused."""
    folder = Path(folder)
    if (folder / RECORDS).exists():
        raise ValueError(f"--out {folder}: holds the records of a job already; give another folder or remove it.")
    folder.mkdir(parents=True, exist_ok=True)


def read_records(*folders: str | Path) -> Iterator[dict[str, Any]]:
    """All records of some jobs' folders. A last line that a kill cut short is left out; other damage is an error."""
    for folder in folders:
        path = Path(folder) / RECORDS
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            record = _record(line)
            if record is not None:
                yield record
            elif number < len(lines):  # a line without its end was being written
                raise ValueError(
                    f"{path}, line {number}: not a JSON object with job, metric and value; remove the line."
                )


def drop_records(folder: str | Path, after: int) -> None:
    """Drop the result and all records of steps that a resumed run takes again: it resumes after step `after`."""
    path = Path(folder) / RECORDS
    if not path.exists():
        return
    records = list(read_records(folder))
    kept = [record for record in records if not _is_result(record) and _step(record) <= after]
    if len(kept) < len(records):
        write_text(path, "".join(_line(record) for record in kept))


def results(records: Iterable[dict[str, Any]], job: str) -> list[dict[str, Any]]:
    """The records that finished runs of a training job ended with."""
    return [record for record in records if record["job"] == job and record["metric"] == RESULTS[job]]


def result_in(folder: str | Path) -> dict[str, Any] | None:
    """The record that the run in this folder ended with; None for one that is not finished or not begun."""
    try:
        return next(filter(_is_result, read_records(folder)), None)
    except FileNotFoundError:
        return None


def write_config(folder: str | Path, config: dict[str, Any]) -> None:
    write_text(Path(folder) / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def read_config(folder: str | Path) -> dict[str, Any] | None:
    """What `write_config` wrote; None for a folder without."""
    try:
        return read_object(Path(folder) / CONFIG)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{error} Put it back as it was, or give another --out.") from error


def _line(record: dict[str, Any]) -> str:
    text = json.dumps(record, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace").decode()  # names of files need not be Unicode, but JSON must


def _record(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None where it holds none."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # not UTF-8, not JSON, too deep
        return None
    named = isinstance(record, dict) and all(isinstance(record.get(name), str) for name in ("job", "metric"))
    return record if named and "value" in record else None


def _is_result(record: dict[str, Any]) -> bool:
    return record["metric"] == RESULTS.get(record["job"])


def _step(record: dict[str, Any]) -> float:
    step = record.get("step", 0)
    return step if isinstance(step, (int, float)) else 0


def _append(path: Path, line: str) -> None:
    """Bring a line to the disk, or leave the file as it was."""
    is_new = not path.exists()
    with open(path, "a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if (last := _unended(file, size)) and _record(last) is None:
            size -= len(last)  # what a kill cut short
            file.truncate(size)
        rest = memoryview((("\n" if _unended(file, size) else "") + line).encode())
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:  # the disk is full
            file.truncate(size)
            raise
    if is_new:
        sync_folder(path.parent)


def _unended(file: BinaryIO, size: int) -> bytes:
    """The last line of a file if nothing ends it."""
    file.seek(max(size - 1, 0))
    if file.read(1) in (b"\n", b""):
        return b""
    file.seek(0)
    return file.read().rpartition(b"\n")[2]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
