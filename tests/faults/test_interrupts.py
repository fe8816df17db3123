"""Signals finish the step and say how to resume; a folder belongs to one process; a lost model is not finished."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import COMMAND, launch
from safetensors.torch import load_file

from nystromformer.cli import main
from nystromformer.files import LOCK
from nystromformer.records import read_records
from nystromformer.training.run import steps_saved
from nystromformer.training.shared.interrupts import resume_command
from nystromformer.training.trainer import ExactTrainer


def arguments(data: Path, out: Path, *more: str) -> list[str]:
    """A run whose losses are logged every 5 steps, so that one that is stopped must carry half a sum along."""
    given = ["lra", "listops", "--data", str(data), "--preset", "smoke", "--attention", "nystrom-8", "--steps", "10"]
    return [
        *given,
        "--set",
        "logging_steps=5",
        "--set",
        "eval_steps=4",
        "--set",
        "save_steps=4",
        "--out",
        str(out),
        *more,
    ]


def found(out: Path) -> tuple[dict, list]:
    weights = {name: tensor.tolist() for name, tensor in load_file(out / "model" / "model.safetensors").items()}
    return weights, [(record["metric"], record.get("step"), record["value"]) for record in read_records(out)]


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> tuple[dict, list]:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(arguments(data, out)) == 0
    assert not [path for path in out.iterdir() if path.name.startswith(("checkpoint", ".")) and path.name != LOCK]
    return found(out)


def signalled(step: int, *numbers: int):
    """A training step during which signals arrive."""
    steps, original = [], ExactTrainer.training_step

    def training_step(self, *given, **named):
        steps.append(1)
        if len(steps) == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        return original(self, *given, **named)

    return training_step


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"])
def test_a_signal_finishes_the_step_and_says_how_to_resume(data, whole, tmp_path, monkeypatch, capfd, number, code):
    out = tmp_path / "run"
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(ExactTrainer, "training_step", signalled(3, number))
        patch.setattr(sys, "argv", ["nystromformer", *arguments(data, out)])
        assert main(arguments(data, out)) == code
    printed = capfd.readouterr().err
    assert f"{signal.Signals(number).name}: this step is finished and saved; a second signal ends at once." in printed
    assert f"stopped after step 3 of 10; resume with: nystromformer lra listops --data {data}" in printed
    assert printed.rstrip().endswith("--resume")
    assert steps_saved(out) == [3]
    assert signal.getsignal(number) is before, "the handlers are those from before"
    assert main(arguments(data, out, "--resume")) == 0
    assert found(out) == whole, "losses that are means over steps before and after the signal, too"


@pytest.mark.slow
def test_a_checkpoint_is_written_by_the_clock(data, whole, tmp_path, monkeypatch):
    out, saved = tmp_path / "run", []
    save = ExactTrainer._save_checkpoint

    def noted(self, *given):
        saved.append(self.state.global_step)
        save(self, *given)

    monkeypatch.setattr(ExactTrainer, "_save_checkpoint", noted)
    clock = SimpleNamespace(monotonic=itertools.count(step=60).__next__)
    monkeypatch.setattr("nystromformer.training.shared.interrupts.time", clock)  # each look at it is a minute later
    assert main(arguments(data, out, "--save-seconds", "50")) == 0
    assert saved == list(range(1, 11))
    assert found(out) == whole


def test_a_run_that_is_alive_is_not_resumed_by_another_process(data, tmp_path, capsys):
    code = (
        "import sys; from pathlib import Path; from nystromformer.files import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    out = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        assert main(arguments(data, out, "--resume")) == 2
        assert f"is being written by process {process.pid}: wait until it ends or stop it" in capsys.readouterr().err
        process.kill()
    assert [path.name for path in out.iterdir()] == [LOCK], "the other process's folder is left alone"
    assert main(arguments(data, out, "--resume")) == 0


@pytest.mark.slow
def test_a_finished_run_with_a_damaged_model_is_trained_again(data, whole, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(arguments(data, out)) == 0
    model = out / "model" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:1000])
    with pytest.warns(
        UserWarning, match="model is damaged .model.safetensors is not what was written.: the run is not"
    ):
        assert main(arguments(data, out, "--resume")) == 0
    assert found(out) == whole


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", b"[]", "config.json: must be a JSON object, but holds a list"),
        ("records.jsonl", b"[1]\n", "records.jsonl, line 1: not a JSON object with job, metric and value"),
        ("records.jsonl", b"{}\n{}\n", "records.jsonl, line 1: not a JSON object with job, metric and value"),
        ("records.jsonl", b"\xff\n", "records.jsonl, line 1: not a JSON object with job, metric and value"),
        ("records.jsonl", b"\0\0\n", "records.jsonl, line 1: not a JSON object with job, metric and value"),
    ],
)
def test_damaged_files_of_a_run_are_one_line(data, tmp_path, capsys, name, content, message):
    out = tmp_path / "run"
    out.mkdir()
    (out / name).write_bytes(content)
    assert main(arguments(data, out, "--resume")) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nystromformer: ")]
    assert message in line
    assert (out / name).read_bytes() == content


def test_a_run_that_fails_before_it_trains_leaves_nothing(data, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("not this way")

    (tmp_path / "mine").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(ExactTrainer, "training_step", fails)
        for out in (tmp_path / "new" / "run", tmp_path / "mine"):
            assert main(arguments(data, out)) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (log,) = (path for path in (tmp_path / "mine").iterdir() if path.name != ".lock")
    assert log.name.startswith("nystromformer-error-"), "only what tells of it"


def test_memory_that_does_not_suffice_is_one_line(data, tmp_path, monkeypatch, capsys):
    def fails(*_, **__):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"
        )

    monkeypatch.setattr(ExactTrainer, "training_step", fails)
    assert main(arguments(data, tmp_path / "run")) == 2
    assert "memory does not suffice" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


TWICE = """
import os, signal, sys
from nystromformer.cli import entry
from nystromformer.training.trainer import ExactTrainer

def step(self, *given, **named):
    for number in (signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), number)
    raise SystemExit("the second signal did not end it")

ExactTrainer.training_step = step
sys.argv = ["nystromformer", *sys.argv[1:]]
entry()
"""


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_shows_the_cursor(data, tmp_path):
    """In a terminal of its own, where the progress bar hides the cursor."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TWICE, *arguments(data, tmp_path / "run")],
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"},
    )
    os.close(theirs)
    printed = b""
    while chunk := _read(ours):
        printed += chunk
    os.close(ours)
    assert process.wait() == 143, printed.decode()
    assert b"\x1b[?25l" in printed, "the bar hid it"
    assert printed.rstrip().endswith(b"\x1b[?25h")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # all its writers are gone
        return b""


SIGNALLED = """
import os, signal, sys
from nystromformer.cli import entry
from nystromformer.training.trainer import ExactTrainer

original, steps = ExactTrainer.training_step, []

def step(self, *given, **named):
    steps.append(1)
    if len(steps) == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return original(self, *given, **named)

ExactTrainer.training_step = step
entry()
"""


@pytest.mark.slow
def test_all_processes_agree_on_the_step_when_one_is_signalled(data, tmp_path):
    given = arguments(data, tmp_path / "run")
    stopped = launch(SIGNALLED, given, tmp_path, processes=2)
    assert stopped.codes == [143, 143], stopped.err
    assert stopped.err.count("stopped after step 3 of 10; resume with: nystromformer lra") == 1
    assert "(by torchrun, with 2 processes as before)" in stopped.err
    assert steps_saved(tmp_path / "run") == [3]
    resumed = launch(COMMAND, [*given, "--resume"], tmp_path, processes=2)
    assert resumed.codes == [0, 0], resumed.err


@pytest.mark.faults
def test_data_workers_serve_a_step_that_is_to_be_finished(data, tmp_path):
    """Ctrl-C reaches all processes of a terminal's group, batch systems signal all processes of a job."""
    out = tmp_path / "run"
    more = ("--steps", "100000", "--set", "dataloader_num_workers=2")
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        resume = ("--resume",) if out.exists() else ()
        process = subprocess.Popen(
            [sys.executable, "-m", "nystromformer", *arguments(data, out, *more, *resume)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        before = len(steps_saved(out)) and steps_saved(out)[-1]
        deadline = time.time() + 300
        while process.poll() is None and time.time() < deadline and not any(step > before for step in steps_saved(out)):
            time.sleep(0.2)
        os.killpg(process.pid, number)
        printed = process.communicate()[1]
        assert process.returncode == code, printed
        assert "; resume with: " in printed


@pytest.mark.parametrize(
    "typed, advised",
    [
        ("/bin/nystromformer lra listops", "nystromformer lra listops --resume"),
        ("/bin/nystromformer lra listops --resume --seed 1", "nystromformer lra listops --resume --seed 1"),
        ("own.py --fast", "python own.py --fast"),
    ],
)
def test_how_to_resume_is_told_as_it_can_be_typed(monkeypatch, typed, advised):
    """A script that runs our commands knows no option of theirs."""
    monkeypatch.setattr(sys, "argv", typed.split())
    assert resume_command() == advised
