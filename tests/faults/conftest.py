"""Tests marked `faults` try everything and take long: `make faults` runs them, others leave them out."""

from pathlib import Path

import pytest

from nystromformer.data.lra.listops import ListOpsOptions, generate


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Left out by selection, whatever else `-m` asks for: what was not asked for is not skipped, either."""
    if "faults" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("faults")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("faults")]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """ListOps for a run of seconds."""
    folder = tmp_path_factory.mktemp("data") / "listops"
    generate(folder, ListOpsOptions(min_tokens=16, max_tokens=64, train=24, dev=6, test=10), workers=1)
    return folder
