"""The page and the last table of a demo: `tests/commands/test_demo.py` runs one."""

import pytest

from nystromformer.demo.run import DemoOptions

GIVEN = {"model": None, "tokens": 512, "lengths": "128", "tiles": 500, "steps": 2, "seed": 0}


def test_options_are_checked_when_made(tmp_path):
    options = DemoOptions(out=tmp_path / "new", **GIVEN)
    assert options.bench.lengths == [128]
    assert options.bench.attentions[:2] == ["standard", "nystrom-64"]
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="must be a new or empty folder"):
        DemoOptions(out=tmp_path, **GIVEN)
    with pytest.raises(ValueError, match="smaller slides have no room"):
        DemoOptions(out=tmp_path / "new", **GIVEN | {"tiles": 10})
