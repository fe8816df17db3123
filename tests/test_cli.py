"""The command line: help, completion, and how it refuses what it can't take."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import typer
from imports import imported_by

from nystromformer import __version__
from nystromformer.cli import app, entry, main
from nystromformer.errors import install_hint

COMMANDS = typer.main.get_command(app).commands
REQUIRED = {
    "convert": "Missing argument 'SRC'.",
    "attention-map": "Missing option '--model'.",
    "lra": "Missing argument 'TASK'.",
    "lra-data": "Missing argument 'TASK'.",
    "pretrain": "Missing option '--corpus'.",
    "finetune": "Missing argument 'TASK'.",
    "report": "Missing argument 'RUNS'.",
}
"""What each command says where it is given nothing; the others need nothing."""


def refusal(arguments, capsys):
    """The one line that a refused command leaves on stderr."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    return line.removeprefix("nystromformer: ")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_help_lists_all_commands_by_what_they_are_for(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert set(COMMANDS) == {
        "demo", "bench", "lra", "lra-data", "pretrain", "finetune", "convert", "distill", "attention-map", "report",
    }  # fmt: skip
    for text in (*COMMANDS, "Compare", "Train", "Take over"):
        assert text in said


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_and_explains_every_option(command, capsys):
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert f"Example: nystromformer {command}" in said
    for parameter in COMMANDS[command].params:
        assert parameter.help, f"{command} {parameter.name}"
    assert "--out" in said or command == "convert"


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 2
    assert "Compare" in capsys.readouterr().out


def test_an_unknown_command_is_refused_in_one_line(capsys):
    assert refusal(["benhc"], capsys) == "No such command 'benhc'. Did you mean 'bench'?"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_refused_in_one_line(command, capsys):
    assert refusal([command, "--sed", "1"], capsys).startswith("No such option: --sed")


@pytest.mark.parametrize("command", REQUIRED)
def test_what_is_missing_is_named_in_one_line(command, capsys):
    assert refusal([command], capsys).lower() == REQUIRED[command].lower()


@pytest.mark.parametrize("command", [name for name in COMMANDS if any(p.name == "seed" for p in COMMANDS[name].params)])
def test_a_value_of_the_wrong_kind_is_refused_in_one_line(command, capsys):
    assert "Invalid value for '--seed'" in refusal([command, "--seed", "first"], capsys)


def test_a_package_that_is_not_installed_is_named_in_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "nystromformer.report.page", None)  # a part of ours: not the user's to fix
    assert main(["report", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "unexpected ModuleNotFoundError" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "nystromformer.report.page", raising=False)
    monkeypatch.delitem(sys.modules, "nystromformer.report.sections", raising=False)
    monkeypatch.delitem(sys.modules, "nystromformer.report.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = refusal(["report", str(tmp_path)], capsys)
    assert said == f"needs matplotlib, which is not installed; {install_hint('train', 'cli')}."


@pytest.mark.parametrize("exists", [True, False], ids=["in the run's folder", "in the system's folder"])
def test_an_unexpected_error_is_one_line_with_a_log_of_the_traceback(exists, monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise RuntimeError("something\nthat nobody\x1b[31m expects")

    monkeypatch.setattr("nystromformer.report.page.write_report", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "system"))
    (tmp_path / "system").mkdir()
    if exists:
        (tmp_path / "out").mkdir()
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nystromformer: unexpected RuntimeError: something that nobody [31m expects; the traceback")
    (log,) = (tmp_path / ("out" if exists else "system")).iterdir()
    assert str(log) in line
    assert "Traceback (most recent call last)" in log.read_text()
    assert "in fail" in log.read_text()
    assert (tmp_path / "out").exists() == exists


def test_a_folder_that_can_not_be_written_is_refused(monkeypatch, tmp_path, capsys):
    """As on a disk that is mounted for reading only; permissions do not hold the superuser back."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for command in (["bench"], ["lra", "listops"], ["report", str(tmp_path)], ["demo"]):
        said = refusal([*command, "--out", str(tmp_path / "a" / "b")], capsys)
        assert said == f"--out {tmp_path}/a/b: {tmp_path} can't be written to; give another folder."


def test_help_does_not_wait_for_torch():
    assert not imported_by("import nystromformer.cli", "torch")


@pytest.fixture
def path_with_the_command():
    """The environment in which `nystromformer` is found, as a shell has it."""
    folder = Path(sys.executable).parent
    return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def test_show_completion_writes_what_bash_needs(path_with_the_command):
    command = ["nystromformer", "--show-completion", "bash"]
    told = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # otherwise the shell is guessed from parent processes
    done = subprocess.run(command, env=path_with_the_command | told, capture_output=True, text=True, check=True)
    assert "complete -o default -F _nystromformer_completion nystromformer" in done.stdout


@pytest.mark.skipif(
    shutil.which("bash") is None, reason="no bash here, whose completion this tests: apt-get install bash"
)
@pytest.mark.parametrize(
    "typed, completed", [("l", ["lra", "lra-data"]), ("bench --l", ["--lengths"]), ("report --o", ["--out"])]
)
def test_bash_completes_commands_and_options(typed, completed, path_with_the_command):
    words = ["nystromformer", *typed.split()]
    script = (
        'eval "$(_NYSTROMFORMER_COMPLETE=source_bash nystromformer)"; '
        f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
        '_nystromformer_completion nystromformer; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], env=path_with_the_command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed


@pytest.mark.parametrize("given, code", [("--version", 0), ("--unknown", 2)])
def test_a_process_that_succeeds_leaves_its_group_before_it_ends(given, code, monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(sys, "argv", ["nystromformer", given])
    try:
        with pytest.raises(SystemExit) as end:
            entry()
        assert end.value.code == code
        assert dist.is_initialized() == (code != 0)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
