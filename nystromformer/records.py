"""Records: one JSON object a measurement, in `records.jsonl` of each job's folder. Reports read nothing else."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from nystromformer.files import write_text
from nystromformer import __version__

RECORDS = "records.jsonl"

CONFIG = "config.json"

RESULTS = {"lra": "test_accuracy", "finetune": "score", "pretrain": "mlm_accuracy"}
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


def machine() -> dict[str, object]:
    """What the measurement ran on."""
    import torch

    found: dict[str, object] = {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def command() -> str:
    """The command line that is running, as one would type it again."""
    program = Path(sys.argv[0])
    name = f"python {os.path.relpath(program)}" if program.suffix == ".py" else program.name
    return " ".join([name, shlex.join(sys.argv[1:])]).strip()


class Recorder:
    """Appends records of one job to its folder; each line is written whole or not at all.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> Recorder(folder, job="bench", config={"length": 512}).record("time", 1.5, unit="ms")
    >>> [(r["job"], r["metric"], r["value"], r["unit"]) for r in read_records(folder)]
    [('bench', 'time', 1.5, 'ms')]
    """

    def __init__(self, folder: str | Path, *, job: str, config: dict[str, object], seed: int | None = None) -> None:
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

    def record(self, metric: str, value: object, **details: object) -> None:
        line = json.dumps({**self.common, "metric": metric, "value": value, **details}, ensure_ascii=False)
        with open(self.folder / RECORDS, "a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()


def new_job_folder(folder: str | Path) -> None:
    """Make the folder of a new job; one that holds another job's records already is refused."""
    folder = Path(folder)
    if (folder / RECORDS).exists():
        raise ValueError(f"--out {folder}: holds the records of a job already; give another folder or remove it.")
    folder.mkdir(parents=True, exist_ok=True)


def read_records(*folders: str | Path) -> Iterator[dict[str, object]]:
    """All records of some jobs' folders. A last line that a kill cut short is left out; other damage is an error."""
    for folder in folders:
        path = Path(folder) / RECORDS
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                if number == len(lines):  # no newline behind it: it was being written
                    continue
                raise ValueError(f"{path}, line {number}: not a JSON object; remove the line.") from error


def results(records: Iterable[dict[str, object]], job: str) -> list[dict[str, object]]:
    """The records that finished runs of a training job ended with."""
    return [record for record in records if record["job"] == job and record["metric"] == RESULTS[job]]


def result_in(folder: str | Path) -> dict[str, object] | None:
    """The record that the run in this folder ended with; None for one that is not finished or not begun."""
    try:
        return next((record for record in read_records(folder) if record["metric"] == RESULTS.get(record["job"])), None)
    except FileNotFoundError:
        return None


def write_config(folder: str | Path, config: dict[str, object]) -> None:
    write_text(Path(folder) / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def table_markdown(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table.

    >>> print(table_markdown(["n", "time"], [[512, "1 ms"]]))
    | n | time |
    |---|---|
    | 512 | 1 ms |
    """
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    text = ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]
    text[1] = "|" + "---|" * len(header)
    return "\n".join(text)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
