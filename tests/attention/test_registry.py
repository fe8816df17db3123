"""`build_attention`: the paper's names, and answers to wrong ones."""

import pytest

from nystromformer.attention.base import Attention
from nystromformer.attention.registry import ATTENTIONS, build_attention, parse_attention_name

SIZE = {"num_heads": 2, "head_dim": 8, "max_length": 64}


def test_holds_every_attention_of_the_paper():
    paper = {"standard", "nystrom", "linformer", "longformer", "reformer", "performer", "linear"}
    assert paper <= set(ATTENTIONS)
    assert all(issubclass(attention, Attention) for attention in ATTENTIONS.values())


@pytest.mark.parametrize(
    "name, option, default, other",
    [
        ("linformer", "projection_dim", 256, 128),
        ("longformer", "window", 257, 129),
        ("performer", "num_features", 256, 64),
        ("reformer", "num_hashes", 2, 4),
    ],
)
def test_the_size_is_that_of_the_papers_tables_unless_a_suffix_sets_it(name, option, default, other):
    assert getattr(build_attention(name, **SIZE), option) == default
    assert parse_attention_name(f"{name}-{other}") == (ATTENTIONS[name], {option: other})
    assert getattr(build_attention(f"{name}-{other}", **SIZE), option) == other


@pytest.mark.parametrize(
    "name, nearest", [("nystrm", "nystrom"), ("Performer", "performer"), ("linfrmer-256", "linformer")]
)
def test_an_unknown_name_lists_the_choices_and_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"attention '{name}': must be one of .*Did you mean '{nearest}'") as error:
        build_attention(name, **SIZE)
    assert all(choice in str(error.value) for choice in ATTENTIONS)


def test_a_name_like_no_other_gets_the_choices_alone():
    with pytest.raises(ValueError, match=r"must be one of standard, .*\.$") as error:
        build_attention("xyz", **SIZE)
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize("name", ["linear-64", "standard-2"])
def test_a_suffix_where_none_fits_is_refused(name):
    with pytest.raises(ValueError, match="takes no number; use"):
        build_attention(name, **SIZE)


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(TypeError, match="attention name 3 is a int"):
        build_attention(3, **SIZE)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_unknown_option_lists_the_options(name):
    with pytest.raises(ValueError, match="option 'color' of attention") as error:
        build_attention(name, **SIZE, color="red")
    options = ATTENTIONS[name].option_defaults()
    assert all(option in str(error.value) for option in options or ["(none)"])


def test_a_misspelt_option_gets_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'window'"):
        build_attention("longformer", **SIZE, windw=9)


def test_a_size_given_twice_is_refused():
    with pytest.raises(ValueError, match="'longformer-129' already sets window; leave out window=65"):
        build_attention("longformer-129", **SIZE, window=65)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_bad_sizes_are_refused(name):
    for option in ("num_heads", "head_dim", "max_length"):
        with pytest.raises(ValueError, match=f"{option}=0: must be at least 1"):
            build_attention(name, **{**SIZE, option: 0})


@pytest.mark.parametrize("name", ATTENTIONS)
def test_prints_its_options(name):
    text = repr(build_attention(name, **SIZE))
    assert "num_heads=2, head_dim=8" in text
    size_option = ATTENTIONS[name].size_option
    assert size_option is None or f"{size_option}=" in text
