"""Breaks a small training run at its file operations, one process after the other, and compares what comes back.

As a script: `python broken_runs.py JOB FOLDER POINTS` tries about so many points (0 is all) in the folder and prints
one JSON object. The process imports everything once and forks; the forks run the command line.
"""

import errno
import gc
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import safetensors.torch
from corpora import texts, write_json_lines, write_vocabulary
from glue_files import write_official
from small_bert import write_bert

from nystromformer.cli import main
from nystromformer.data.lra.listops import ListOpsOptions, generate
from nystromformer.files import CHECKSUMS, LOCK
from nystromformer.records import RECORDS

SLOW_IMPORTS = (
    "accelerate",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg",
    "torch.utils.tensorboard",
    "transformers.models.bert.modeling_bert",
    "nystromformer.report.figures",
    "nystromformer.training.distillation.run",
    "nystromformer.training.finetuning.sweep",
    "nystromformer.training.lra",
    "nystromformer.training.pretraining",
)
"""Once for all forks."""
LRA = ["lra", "listops", "--data", "../listops", "--preset", "smoke", "--attention", "nystrom-16", "--out", "run"]
COMMANDS = {
    "lra": LRA,
    "self-pretrain": [*LRA, "--self-pretrain", "4"],
    "finetune": ["finetune", "sst2", "--model", "../bert", "--data", "../glue", "--preset", "smoke", "--predict",
                 "--attention", "nystrom-4", "--out", "run"],
    "pretrain": ["pretrain", "--corpus", "../corpus.jsonl", "--tokenizer", "train", "--vocab-size", "60", "--preset",
                 "smoke", "--size", "tiny", "--steps", "4", "--workers", "1", "--set", "dataloader_num_workers=0",
                 "--cache", "cache", "--out", "run"],
    "distill": ["distill", "--model", "../bert", "--corpus", "../corpus.jsonl", "--attention", "nystrom-8", "--preset",
                "smoke", "--held-out-share", "0.3", "--out", "run"],
}  # fmt: skip
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
KILL, POWER, FULL = "kill", "power", "full"
"""A process that is killed leaves what it wrote; a power cut takes half of what was not brought to the disk, too. From
the point on at which the disk is full, nothing more can be written."""
TIMES = ("seconds", "core_seconds", "tokens_per_second", "speed", "command")
"""What records say of the process that wrote them."""
TABLE, SPEEDS, TIMED_COLUMNS = "table.md", "**Training speed", ("core-minutes", "times as fast")
"""What a table says of it comes last, or in columns of its own."""
CARD, TIMED_WORDS = "README.md", re.compile(r"[\d.]+ minutes of one core|[\d.]+ times that of exact attention \(.*?\)")
"""What a model's card says of it."""
SENSITIVITY = "sensitivity.json"
"""How long each layer took with each attention is in it, too."""


@dataclass
class Outcome:
    point: int
    mode: str
    operation: str
    problem: str | None


class Injector:
    """Counts the operations that change files in a folder, and breaks the run at one of them."""

    def __init__(self, folder: Path, point: int | None, mode: str, log: Path) -> None:
        self.folder, self.point, self.mode = str(folder.resolve()), point, mode
        self.count, self.unsynced = 0, {}
        self.log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.fsync, self.save_file = os.fsync, safetensors.torch.serialize_file
        os.fsync = self.synced
        safetensors.torch.serialize_file = self.saved
        sys.addaudithook(self.audited)

    def audited(self, event: str, arguments: tuple) -> None:
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, (str, bytes)) and flags & (os.O_WRONLY | os.O_RDWR) and self.is_inside(path):
                self.operation(f"open {mode}", path)
                self.wrote(path)
        elif event in CHANGES and self.is_inside(arguments[0]):
            self.operation(event, arguments[0])
            if event == "os.rename":
                moved = {str(Path(arguments[0]).resolve()): str(Path(arguments[1]).resolve())}
                for source, target in moved.items():
                    for path in [each for each in self.unsynced if each == source or each.startswith(source + "/")]:
                        self.unsynced[target + path[len(source) :]] = self.unsynced.pop(path)

    def synced(self, handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if self.is_inside(path):
            self.operation("fsync", path)
        self.fsync(handle)
        self.unsynced.pop(path, None)

    def saved(self, tensors: object, path: str, metadata: object = None) -> None:
        self.operation("safetensors", path)
        self.wrote(path)
        self.save_file(tensors, path, metadata)

    def wrote(self, path: object) -> None:
        path = str(Path(os.fsdecode(path)).resolve())
        self.unsynced.setdefault(path, os.path.getsize(path) if os.path.exists(path) else 0)

    def is_inside(self, path: object) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False
        whole = os.path.abspath(os.fsdecode(path))
        return whole.startswith(self.folder + "/") and "/tensorboard/" not in whole

    def operation(self, name: str, path: object) -> None:
        self.count += 1
        place = os.path.relpath(os.fsdecode(path), self.folder)
        os.write(self.log, f"{name} {place}\n".encode())
        if self.mode == FULL:
            if self.point is not None and self.count >= self.point and name not in ("os.remove", "os.rmdir"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
        elif self.count == self.point:
            if self.mode == POWER:
                for unsynced, before in self.unsynced.items():
                    if os.path.isfile(unsynced) and (size := os.path.getsize(unsynced)) > before:
                        os.truncate(unsynced, before + (size - before) // 2)
            os.kill(os.getpid(), signal.SIGKILL)


def in_a_fork(work: Callable[[], int], log: Path) -> int:
    """The exit status of a process that does the work, and writes what it prints."""
    process = os.fork()
    if process == 0:
        code = 99
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # whatever a test runner made of them
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def enter(folder: Path, arguments: list[str]) -> None:
    """Be the process of a command in a folder."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    sys.argv = ["nystromformer", *arguments]


def run(folder: Path, arguments: list[str], point: int | None = None, mode: str = KILL) -> int:
    """Run the command in a folder, to the end or to the operation that is the given one."""

    def work() -> int:
        enter(folder, arguments)
        if "--resume" not in arguments:
            Injector(folder, point, mode, folder.with_suffix(".operations"))
        return main(arguments)

    return in_a_fork(work, folder.with_suffix(".log"))


def contents(folder: Path) -> dict[str, object]:
    """What must be equal however often a run was broken: all files but pictures, records but for their times."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or "/tensorboard/" in name or path.name.endswith(LOCK) or path.suffix in (".png", ".svg"):
            continue
        text = path.read_text() if path.suffix in (".json", ".jsonl", ".md") else ""
        if path.name == RECORDS:
            records = [json.loads(line) for line in text.splitlines()]
            found[name] = [_without_times(record) for record in records if record["metric"] not in TIMES]
        elif path.name == TABLE:
            found[name] = _without_timed_columns(text.partition(SPEEDS)[0])
        elif path.name == CARD:
            found[name] = TIMED_WORDS.sub("", text)
        elif path.name == CHECKSUMS:
            found[name] = {file: digest for file, digest in json.loads(text).items() if file != CARD}
        elif path.name == SENSITIVITY:
            found[name] = _without_times(json.loads(text))
        else:
            found[name] = path.read_bytes()
    return found


def _without_times(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_times(each) for key, each in value.items() if key not in TIMES}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


def _without_timed_columns(table: str) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    kept: list[list[str]] = []
    header: list[str] = []
    for row in rows:
        header = header if len(row) == len(header) else row
        kept.append([cell for cell, title in zip(row, header, strict=True) if title not in TIMED_COLUMNS])
    return kept


def difference(expected: dict[str, object], found: dict[str, object]) -> str | None:
    for name in expected.keys() | found.keys():
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is left over"
        if expected[name] != found[name]:
            return f"{name} differs"
    return None


def import_all() -> None:
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # forks that collect garbage look through their own objects alone


def prepare(folder: Path) -> None:
    """The data of all jobs."""
    generate(folder / "listops", ListOpsOptions(min_tokens=16, max_tokens=64, train=16, dev=6, test=10), workers=1)
    write_official(folder / "glue")
    write_bert(folder / "bert")
    write_json_lines(folder / "corpus.jsonl", texts(60))
    write_vocabulary(folder)


def try_all(job: str, folder: Path, points: int) -> dict[str, object]:
    """Kill the job at every operation, or at about so many, and resume it."""
    folder.mkdir(parents=True, exist_ok=True)
    import_all()
    if in_a_fork(lambda: prepare(folder) or 0, folder / "prepare.log"):
        raise RuntimeError((folder / "prepare.log").read_text())
    whole, arguments = folder / "whole", COMMANDS[job]
    if run(whole, arguments):
        raise RuntimeError(whole.with_suffix(".log").read_text())
    expected = contents(whole)
    assert any(name.endswith(f"model/{CHECKSUMS}") for name in expected)
    operations = whole.with_suffix(".operations").read_text().splitlines()
    chosen = [(point, mode) for point in range(1, len(operations) + 1) for mode in (KILL, POWER, FULL)]
    if points:
        stride = max(1, len(chosen) // points)
        chosen = chosen[:: stride + (stride % 3 == 0)]  # so that it takes all modes
    random.Random(0).shuffle(chosen)  # what is done of it at any time is a fair sample
    outcomes = []
    for point, mode in chosen:
        place = folder / f"{point}-{mode}"
        problem = broken(run(place, arguments, point, mode), mode, place.with_suffix(".log").read_text())
        code = run(place, [*arguments, "--resume"])
        if code:
            problem = f"--resume ends with {code}: {place.with_suffix('.log').read_text()[-500:]}"
        problem = problem or difference(expected, contents(place))
        outcomes.append(Outcome(point, mode, operations[point - 1], problem))
        with open(folder / "outcomes.jsonl", "a") as file:
            file.write(json.dumps(asdict(outcomes[-1])) + "\n")
        if problem is None:
            shutil.rmtree(place)
    failures = [asdict(outcome) for outcome in outcomes if outcome.problem]
    tried = {mode: sum(outcome.mode == mode for outcome in outcomes) for mode in (KILL, POWER, FULL)}
    return {"job": job, "operations": len(operations), "tried": tried, "failures": failures}


def broken(code: int, mode: str, printed: str) -> str | None:
    """What is wrong with how a run ended: by the signal, or with one line where it was the disk."""
    if mode != FULL:
        return None if code == -signal.SIGKILL else f"was not killed, but ended with {code}"
    lines = [line for line in printed.splitlines() if line.startswith("nystromformer: ")]
    if code == 0 or (code == 2 and len(lines) == 1 and "Traceback" not in printed):
        return None
    return f"a full disk ends it with {code}: {printed[-500:]}"


def print_all(job: str, folder: str, points: str) -> None:
    print(json.dumps(try_all(job, Path(folder), int(points)), indent=1))


if __name__ == "__main__":
    print_all(*sys.argv[1:])
