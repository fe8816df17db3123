"""Tests marked `faults` try everything and take long: `make faults` runs them, others leave them out."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "faults" in config.option.markexpr:
        return
    for item in items:
        if item.get_closest_marker("faults"):
            item.add_marker(pytest.mark.skip(reason="takes long: `make faults` runs it"))
