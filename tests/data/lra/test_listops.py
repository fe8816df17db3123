"""ListOps: expressions by LRA's rules, files that are whole or absent, and readers that say what is wrong."""

import json
import re
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nystromformer.data.lra import listops
from nystromformer.data.lra.listops import (
    FILES,
    TOKENS,
    ListOpsOptions,
    TreeOptions,
    distinct_examples,
    generate,
    number_of_expressions,
    random_examples,
    read,
)

SMALL = ListOpsOptions(min_tokens=5, max_tokens=40, train=60, dev=20, test=20, seed=3)


def value_of(words: list[str]) -> int:
    """The value of an expression by recursion over its words, which are used up."""
    word = words.pop(0)
    if word.isdigit():
        return int(word)
    arguments = []
    while words[0] != "]":
        arguments.append(value_of(words))
    words.pop(0)
    assert 2 <= len(arguments) <= 10
    return {
        "[MIN": min(arguments),
        "[MAX": max(arguments),
        "[MED": int(statistics.median(arguments)),
        "[SM": sum(arguments) % 10,
    }[word]


def depth_of(words: list[str]) -> int:
    """Levels of the expression, digits included."""
    depth = deepest = 0
    for word in words:
        depth += word.startswith("[") - (word == "]")
        deepest = max(deepest, depth + word.isdigit())
    return deepest


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31), low=st.sampled_from([3, 64, 500]))
def test_expressions_have_their_value_and_their_length(seed, low):
    options = TreeOptions(min_tokens=low, max_tokens=4 * low)
    for source, target in random_examples(seed, 0, options)[:50]:
        words = source.decode().split(" ")
        assert low < len(words) < 4 * low
        assert set(words) <= set(TOKENS)
        assert depth_of(words) <= options.max_depth
        assert value_of(words) == target
        assert not words, "one expression and nothing after it"


def test_nodes_follow_the_published_distribution():
    """Of all expressions, not only long ones: three digits in four, 2 to 10 arguments alike, operators alike."""
    kinds, arguments, roots = [], [], []
    for chunk in range(10):
        levels = listops_levels(chunk)
        roots.append(levels[0].is_operator)
        kinds.append(levels[1].kind[levels[1].is_operator])
        arguments.append(levels[1].arguments[levels[1].is_operator])
    assert np.concatenate(roots).mean() == pytest.approx(0.25, abs=0.01)
    assert np.bincount(np.concatenate(kinds)) / sum(map(len, kinds)) == pytest.approx(0.25, abs=0.02)
    counts = np.bincount(np.concatenate(arguments), minlength=11)
    assert counts[:2].sum() == 0
    assert counts[2:] / counts.sum() == pytest.approx(1 / 9, abs=0.02)


def listops_levels(chunk):
    from nystromformer.data.lra.listops import grow

    return grow(np.random.default_rng([0, chunk]), TreeOptions(min_tokens=0, max_tokens=100_000))


@pytest.mark.slow
def test_examples_do_not_depend_on_the_number_of_workers(tmp_path):
    options = ListOpsOptions(min_tokens=16, max_tokens=64, train=3000, dev=50, test=50)
    for workers in (1, 2):
        generate(tmp_path / str(workers), options, workers)
    for name in FILES.values():
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_a_set_has_no_example_twice_and_another_seed_gives_another_set(tmp_path):
    one, other = (ListOpsOptions(min_tokens=3, max_tokens=10, train=800, dev=50, test=50, seed=seed) for seed in (0, 1))
    sources = {}
    for options in (one, other):
        generate(tmp_path / str(options.seed), options)
        lines = [line for name in FILES.values() for line in rows(tmp_path / str(options.seed) / name)]
        sources[options.seed] = [line.split("\t")[0] for line in lines]
        assert len(set(sources[options.seed])) == 900
    assert sources[0] != sources[1]


def rows(path):
    header, *lines = path.read_text().splitlines()
    assert header == "Source\tTarget"
    return lines


def test_what_is_written_is_read(tmp_path):
    generate(tmp_path / "set", SMALL)
    splits = read(tmp_path / "set", max_length=2000)
    assert [len(part) for part in (splits.train, splits.dev, splits.test)] == [60, 20, 20]
    for position, line in enumerate(rows(tmp_path / "set" / FILES["dev"])):
        source, target = line.split("\t")
        example = splits.dev[position]
        assert [TOKENS[token - 1] for token in example["input_ids"][0]] == source.split()
        assert example["labels"].tolist() == [int(target)]


def test_the_released_form_with_parentheses_is_read_alike(tmp_path):
    for name in FILES.values():
        (tmp_path / name).write_bytes(b"Source\tTarget\r\n( ( ( [MAX 2 ) ( ( ( [SM 9 ) 4 ) ] ) ) ] )\t3\r\n")
    tokens = [TOKENS[token - 1] for token in read(tmp_path, 100).test[0]["input_ids"][0]]
    assert " ".join(tokens) == "[MAX 2 [SM 9 4 ] ]"
    assert read(tmp_path, 100).departures == ()


def test_expressions_are_cut_at_the_longest_length(tmp_path):
    generate(tmp_path / "set", SMALL)
    assert read(tmp_path / "set", max_length=7).train.lengths.max() == 7


def test_an_interrupted_generation_leaves_nothing_behind(tmp_path):
    def stop(made, wanted):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path / "set", SMALL, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_generation_is_no_data_set_and_does_not_hinder_the_next(tmp_path):
    unfinished = tmp_path / ".set.unfinished"
    unfinished.mkdir()
    (unfinished / FILES["train"]).write_text("Source\tTarget\n")
    with pytest.raises(ValueError, match=r"set/basic_train.tsv: no such file"):
        read(tmp_path / "set", 100)
    generate(tmp_path / "set", SMALL)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set"]


def test_progress_reaches_the_end(tmp_path):
    calls = []
    generate(tmp_path / "set", SMALL, progress=lambda made, wanted: calls.append((made, wanted)))
    assert calls[-1] == (100, 100)


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not an empty folder: give another --out"):
        generate(tmp_path, SMALL)


def test_impossible_bounds_are_found_out(monkeypatch):
    monkeypatch.setattr(listops, "FRUITLESS_CHUNKS", 2)
    options = ListOpsOptions(min_tokens=400, max_tokens=500, max_depth=2)
    with pytest.raises(ValueError, match=r"only 0 of 10 different expressions .* widen the bounds"):
        next(distinct_examples(options, 10, workers=1))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text.replace("Source\t", "Text\t"), r"line 1: 'Text\\tTarget'; must name the 2 columns"),
        (lambda text: text.replace("\n", "\tx\n", 3), r"line 1: .*must name|line 2: 3 columns; must be 2 columns"),
        (lambda text: re.sub(r"\t\d\n$", "\t12\n", text), r"line 21: label '12'; must be 0 to 9"),
        (lambda text: re.sub(r"\t\d\n$", "\t\n", text), r"line 21: label ''; must be 0 to 9"),
        (lambda text: text.replace("[", "[X", 1), r"line 2: token '\[X.*must be a digit"),
        (lambda text: text.rsplit("]", 1)[0] + "\t1\n", r"line 21: .*unequal brackets; the line was cut short"),
        (lambda text: text[:-5], r"line 21: the file ends in the middle of the line"),
        (lambda text: text[: text.index("\n", 200) + 1], r"promises 20; the file was cut short"),
        (lambda text: "", r"no rows; the file was cut short"),
    ],
    ids=["header", "columns", "label", "no-label", "token", "brackets", "cut-line", "cut-rows", "empty"],
)
def test_a_damaged_file_is_named_with_its_line_and_a_remedy(tmp_path, change, message):
    generate(tmp_path / "set", SMALL)
    path = tmp_path / "set" / FILES["dev"]
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=message) as refused:
        read(tmp_path / "set", 2000)
    assert "basic_val.tsv" in str(refused.value)


def test_a_missing_file_is_named_with_what_is_there(tmp_path):
    generate(tmp_path / "set", SMALL)
    (tmp_path / "set" / FILES["test"]).unlink()
    with pytest.raises(ValueError, match=r"basic_test.tsv: no such file; .* holds basic_train.tsv, basic_val.tsv"):
        read(tmp_path / "set", 2000)


def test_a_set_says_how_it_was_made(tmp_path):
    generate(tmp_path / "set", SMALL)
    described = json.loads((tmp_path / "set" / "dataset.json").read_text())
    assert described["options"]["seed"] == 3
    assert described["examples"] == {"train": 60, "dev": 20, "test": 20}
    assert read(tmp_path / "set", 100).departures == ("5 to 40 tokens",)
    generate(tmp_path / "usual", ListOpsOptions(train=2, dev=1, test=1))
    assert read(tmp_path / "usual", 100).departures == ()


@pytest.mark.parametrize(
    "options", [{"min_tokens": 10, "max_tokens": 11}, {"max_depth": 1}, {"max_arguments": 1}, {"train": 0}]
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match="must be"):
        ListOpsOptions(**options)


def test_more_expressions_than_there_are_is_refused_at_once():
    with pytest.raises(ValueError, match="there are only 400, of which at most half can be drawn"):
        ListOpsOptions(min_tokens=2, max_tokens=5, train=100_000)


def test_expressions_are_counted_right():
    """By shapes: each digit stands for ten, each bracket for four operators."""
    longest, shapes = 12, {"d"}
    while True:  # all that can be built of those found so far
        pairs = {x + y for x in shapes for y in shapes}
        triples = {some + y for some in pairs for y in shapes if len(some + y) + 2 <= longest}
        new = {f"[{some}]" for some in pairs | triples if len(some) + 2 <= longest} - shapes
        if not new:
            break
        shapes |= new
    expected = sum(10 ** shape.count("d") * 4 ** shape.count("[") for shape in shapes)
    options = TreeOptions(min_tokens=0, max_tokens=longest + 1, max_arguments=3)
    assert number_of_expressions(options, at_least=10**20) == expected
