"""Training runs that are killed, lose their power or fill the disk at any file operation end as if nothing had been."""

import json
from pathlib import Path

import broken_runs
import pytest
from forked import LONGEST, launch


def try_points(job: str, folder: Path, points: int) -> dict[str, object]:
    """In a process without the threads of other tests, whose forks could hang."""
    code = "import sys; from broken_runs import print_all; print_all(*sys.argv[1:])"
    done = launch(code, [job, folder / job, points], folder, longest=None if points == 0 else LONGEST)
    assert done.codes == [0], done.err
    return json.loads(done.out)


@pytest.mark.slow(seconds=12)
@pytest.mark.parametrize("job", broken_runs.COMMANDS)
def test_some_file_operations(job, tmp_path):
    found = try_points(job, tmp_path, 4)
    assert found["failures"] == []
    assert all(found["tried"].values()), "kills, power cuts and full disks"


@pytest.mark.faults
@pytest.mark.parametrize("job", broken_runs.COMMANDS)
def test_every_file_operation(job, tmp_path):
    found = try_points(job, tmp_path, 0)
    print(json.dumps({name: found[name] for name in ("job", "operations", "tried")}))  # for docs/reliability.md
    assert found["failures"] == []
    assert all(count == found["operations"] for count in found["tried"].values())
