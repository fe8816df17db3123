"""What tests of integrations share."""

import pytest

from nystromformer.integrations.offered import OPTIONS


@pytest.fixture(autouse=True)
def short_input_is_approximated(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default models compute up to 256 tokens exactly. These tests are of the approximation, on fewer tokens;
    `test_short_texts_are_exact_by_default` is of the default."""
    for options in OPTIONS.values():
        monkeypatch.setitem(options, "exact_below", None)
