"""What tests of Long Range Arena's training share: runs of seconds on a few expressions."""

from collections.abc import Callable
from pathlib import Path

import pytest

from nystromformer.cli import main
from nystromformer.data.lra.listops import ListOpsOptions, generate


@pytest.fixture(scope="session")
def expressions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "listops"
    generate(folder, ListOpsOptions(min_tokens=16, max_tokens=64, train=24, dev=6, test=10), workers=1)
    return folder


@pytest.fixture(scope="session")
def lra(expressions: Path) -> Callable[..., int]:
    def run(out: Path, *more: object) -> int:
        given = ("listops", "--preset", "smoke", "--attention", "nystrom-8", "--data", expressions, "--out", out, *more)
        return main(["lra", *map(str, given)])

    return run


@pytest.fixture(scope="session")
def self_pretrained(lra: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to the end, with six steps of self-pretraining."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert lra(out, "--self-pretrain", "6") == 0
    return out
