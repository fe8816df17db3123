"""Training runs that are killed, lose their power or fill the disk at any file operation end as if nothing had been."""

import json
import subprocess
import sys
from pathlib import Path

import broken_runs
import pytest


def try_points(job: str, folder: Path, points: int) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, broken_runs.__file__, job, str(folder), str(points)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("job", broken_runs.COMMANDS)
def test_some_file_operations(job, tmp_path):
    found = try_points(job, tmp_path / job, 6)
    assert found["failures"] == []
    assert all(found["tried"].values()), "kills, power cuts and full disks"


@pytest.mark.faults
@pytest.mark.parametrize("job", broken_runs.COMMANDS)
def test_every_file_operation(job, tmp_path):
    found = try_points(job, tmp_path / job, 0)
    print(json.dumps({name: found[name] for name in ("job", "operations", "tried")}))  # for docs/reliability.md
    assert found["failures"] == []
    assert all(count == found["operations"] for count in found["tried"].values())
