"""Disks that are full or can't be written, and memory that does not suffice: one line, and nothing lost."""

import subprocess
import sys
from pathlib import Path

import memory_limits
import pytest
from safetensors.torch import load_file

from nystromformer.cli import main
from nystromformer.records import read_records


def arguments(data: Path, out: Path, *more: str) -> list[str]:
    given = ["lra", "listops", "--data", str(data), "--preset", "smoke", "--attention", "nystrom-8", "--steps", "20"]
    return [*given, "--out", str(out), *more]


class Disk:
    """A small disk of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def mount(self, options: str) -> bool:
        return (
            subprocess.run(["mount", *options.split(), "tmpfs", str(self.folder)], capture_output=True).returncode == 0
        )


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "disk")
    if not disk.mount("-t tmpfs -o size=900k"):
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk.folder)], check=True)


def refusal(capsys) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("nystromformer: ")]
    return line


@pytest.mark.slow
def test_a_full_disk_never_leaves_another_model_as_the_best(data, disk, tmp_path, capsys):
    """900 kB have room for the first checkpoints, not for all that are kept."""
    assert main(arguments(data, tmp_path / "whole")) == 0
    capsys.readouterr()
    out = disk.folder / "run"
    code = main(arguments(data, out))
    if code == 2:
        assert "No space left on device" in refusal(capsys)
        assert disk.mount("-o remount,size=50m")
        assert main(arguments(data, out, "--resume")) == 0
    assert code in (0, 2)
    results = [list(read_records(folder))[-1] for folder in (tmp_path / "whole", out)]
    assert results[0]["metric"] == results[1]["metric"] == "test_accuracy"
    for name in ("value", "best_step", "dev_accuracy"):
        assert results[0][name] == results[1][name]
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "whole", out))
    assert all((one[name] == other[name]).all() for name in one)


def test_a_disk_that_can_not_be_written_is_one_line(data, disk, capsys):
    assert disk.mount("-o remount,ro")
    assert main(arguments(data, disk.folder / "run")) == 2
    assert str(disk.folder) in refusal(capsys)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["lra", pytest.param("pretrain", marks=pytest.mark.faults)])
def test_a_limit_of_memory_is_one_line_and_no_loss(job, tmp_path):
    """In a process of its own: what other tests hold would count, and threads that they left would lock a fork up."""
    command = [sys.executable, memory_limits.__file__, job, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
