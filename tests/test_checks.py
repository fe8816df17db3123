"""Checks of arguments: what was given, what is allowed, what to do; without torch."""

import pytest
from imports import imported_by

from nystromformer.checks import check_at_least, check_choice, check_fraction, check_number, check_odd, did_you_mean


@pytest.mark.parametrize(
    "check, arguments, error, message",
    [
        (
            check_choice,
            ("color", "rde", ["red", "blue"]),
            ValueError,
            r"color='rde': must be one of 'red', 'blue'. D",
        ),
        (check_choice, ("color", None, ["red"]), ValueError, r"color=None: must be one of 'red'"),
        (check_at_least, ("n", 0, 1, "3 is usual"), ValueError, r"n=0: must be at least 1; 3 is usual"),
        (check_at_least, ("n", 1.0, 1), TypeError, r"n=1.0 is a float: must be a whole number of at least 1"),
        (check_at_least, ("n", True, 1), TypeError, r"n=True is a bool"),
        (check_odd, ("k", 4), ValueError, r"k=4: must be odd, so that it has a center; use 3 or 5"),
        (check_odd, ("k", -1), ValueError, r"k=-1: must be at least 1"),
        (check_number, ("x", "1"), TypeError, r"x='1' is a str: must be a number"),
        (check_number, ("x", float("nan")), ValueError, r"x=nan: must be finite"),
        (check_number, ("x", -float("inf")), ValueError, r"x=-inf: must be finite"),
        (check_number, ("x", 0.5, 1, "2 is usual"), ValueError, r"x=0.5: must be finite and at least 1; 2 is usual"),
        (check_fraction, ("p", 1), ValueError, r"p=1: must be at least 0 and below 1"),
        (check_fraction, ("p", None), TypeError, r"p=None is a NoneType: must be a number with 0 <= p < 1"),
    ],
)
def test_refusals(check, arguments, error, message):
    with pytest.raises(error, match=message):
        check(*arguments)


def test_what_is_allowed_passes():
    check_choice("color", "red", ["red"])
    check_at_least("n", 1, 1)
    check_odd("k", 3)
    check_number("x", -2.5)
    check_fraction("p", 0)


def test_a_word_like_no_other_gets_no_suggestion():
    assert did_you_mean("xyz", ["nystrom"]) == ""


def test_no_torch_is_needed():
    assert not imported_by("import nystromformer.checks", "torch")
