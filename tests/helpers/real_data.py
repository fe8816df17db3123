"""Real data in the layouts that users have. It is no part of the repository: without it these tests are skipped."""

import os
from pathlib import Path

import pytest

VARIABLE = "NYSTROMFORMER_DATA"
REAL_DATA = Path(os.environ.get(VARIABLE, ""))
"""Holds `glue/`, `imdb/`, `cifar10/`, `aan/`, `wikipedia/` and `vocab/`."""

needs_real_data = pytest.mark.skipif(
    VARIABLE not in os.environ,
    reason=f"{VARIABLE} names no folder with real data: see tests/helpers/real_data.py",
)
