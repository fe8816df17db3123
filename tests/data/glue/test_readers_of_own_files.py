"""The user's own files, in four formats."""

import csv
import json
import os

import pytest
from glue_files import write_parquet

from nystromformer.data.glue import Columns, read_custom

ROWS = [(f'text, with "marks"\nand lines {i}', f"pair {i}", ("no", "yes")[i % 2]) for i in range(20)]
COLUMNS = Columns(first="body", second="other", label="verdict")
NAMES = ("body", "other", "verdict")


def write(path, rows=ROWS, names=NAMES):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writerows([names, *rows])
    elif path.suffix == ".parquet":
        write_parquet(path, **{name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)})
    else:
        path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_one_file_is_read_and_a_tenth_held_out(tmp_path, kind):
    splits = read_custom(str(write(tmp_path / f"mine.{kind}")), COLUMNS)
    assert splits.labels == ("no", "yes")
    assert (len(splits.train), len(splits.dev["dev"]), splits.test) == (18, 2, {})
    together = {(first, second): label for part in (splits.train, splits.dev["dev"])
                for first, second, label in zip(part.first, part.second, part.labels, strict=True)}  # fmt: skip
    assert together == {(first, second): int(label == "yes") for first, second, label in ROWS}


def test_a_folder_has_parts_and_the_test_part_needs_no_labels(tmp_path):
    write(tmp_path / "train.csv")
    write(tmp_path / "validation.jsonl", ROWS[:6])
    write(tmp_path / "test.parquet", [row[:2] for row in ROWS[:5]], NAMES[:2])
    splits = read_custom(str(tmp_path), COLUMNS)
    assert (len(splits.train), len(splits.dev["dev"]), len(splits.test["test"])) == (20, 6, 5)
    assert splits.test["test"].labels is None
    write(tmp_path / "test.parquet", ROWS[:5])
    assert read_custom(str(tmp_path), COLUMNS).test["test"].labels.tolist() == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    "values, labels", [((1, 5, 3), ("1", "3", "5")), ((0.5, 2.0, 1.0), None), ((True, False, True), ("False", "True"))]
)
def test_labels_are_classes_or_numbers(tmp_path, values, labels):
    rows = [(f"text {i}", "pair", values[i % 3]) for i in range(9)]
    splits = read_custom(str(write(tmp_path / "train.jsonl", rows)), COLUMNS)
    assert splits.labels == labels


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.csv", "body,verdict\nx,yes\n", r"a.csv, line 2: columns body, verdict; must have .*\(other missing\)"),
        ("a.csv", "body,other,verdict\nx,y\n", r"a.csv, line 2: another number of columns than the header's 3"),
        ("a.csv", 'body,other,verdict\n"x,y,no\n', r"a.csv, line .: unexpected end of data; fix its quotation"),
        ("a.csv", "body,other,verdict\nx,y,no\n,y,yes\n", r"a.csv, line 3: the text in column body is empty"),
        ("a.csv", "body,other,verdict\nx,y,\n", r"a.csv, line 2: column verdict is empty"),
        ("a.csv", "body,other,verdict\nx,y,no\n", r"a.csv: 1 different labels.*is --label-column the right"),
        ("a.csv", "", r"a.csv: no rows"),
        ("a.jsonl", '{"body": 3, "other": "y", "verdict": 0}\n{"body": "x", "other": "y", "verdict": 1}\n',
         r"a.jsonl, line 1: column body holds 3; must be a text"),
        ("a.jsonl", "{\n", r"a.jsonl, line 1: not JSON"),
        ("a.jsonl", "[1]\n", r"a.jsonl, line 1: \[1\]; must be an object"),
        ("a.txt", "x", r"a.txt: must be one of .csv"),
    ],
)  # fmt: skip
def test_wrong_files_are_named_with_their_row(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_custom(str(tmp_path / name), COLUMNS)


def test_labels_that_training_does_not_know_are_named(tmp_path):
    write(tmp_path / "train.csv")
    write(tmp_path / "dev.csv", [("x", "y", "maybe")])
    with pytest.raises(ValueError, match=r"dev.csv, line 2: label 'maybe'; must be one of no, yes"):
        read_custom(str(tmp_path), COLUMNS)


def test_missing_and_doubtful_parts_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere: no such file or folder"):
        read_custom(str(tmp_path / "nowhere"), COLUMNS)
    with pytest.raises(ValueError, match=r"no train file \(train.csv, "):
        read_custom(str(tmp_path), COLUMNS)
    write(tmp_path / "train.csv")
    write(tmp_path / "train.jsonl")
    with pytest.raises(ValueError, match=r"train.csv, train.jsonl are all the train part"):
        read_custom(str(tmp_path), COLUMNS)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "1e400", "1e39", "9" * 6_000])
def test_one_bad_number_is_named_and_does_not_turn_numbers_into_classes(tmp_path, bad):
    rows = [(f"text {i}", "pair", bad if i == 4 else i / 4) for i in range(9)]
    with pytest.raises(ValueError, match=r"train.csv, line 6: label .*fix or remove"):
        read_custom(str(write(tmp_path / "train.csv", rows)), COLUMNS)


def test_whole_numbers_with_one_that_is_none_are_refused(tmp_path):
    rows = [(f"text {i}", "pair", "nan" if i == 4 else i % 3) for i in range(9)]
    with pytest.raises(ValueError, match=r"train.csv, line 6: label 'nan' among numbers"):
        read_custom(str(write(tmp_path / "train.csv", rows)), COLUMNS)


@pytest.mark.parametrize("label", [[1], {"a": 1}], ids=["list", "dict"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_label_is_one_value(tmp_path, label, kind):
    rows = [(f"text {i}", "pair", label) for i in range(9)]
    with pytest.raises(ValueError, match=r"(line|row) 1: label .*must be one text or number"):
        read_custom(str(write(tmp_path / f"train.{kind}", rows)), COLUMNS)


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.csv", "body,other,verdict,body\nx,y,no,z\n"),
        ("a.jsonl", '{"body": "x", "other": "y", "verdict": 0, "body": "z"}\n'),
    ],
)
def test_columns_of_one_name_are_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=r"line 1: column 'body' is there twice"):
        read_custom(str(tmp_path / name), COLUMNS)


def test_parquet_columns_of_one_name_are_refused(tmp_path):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table([["x"], ["y"], ["no"], ["z"]], names=["body", "other", "verdict", "body"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet: column 'body' is there twice"):
        read_custom(str(tmp_path / "a.parquet"), COLUMNS)


def test_nested_json_and_endless_lines_are_refused(tmp_path):
    (tmp_path / "deep.jsonl").write_text('{"body": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    with pytest.raises(ValueError, match=r"deep.jsonl, line 1: nested too deeply"):
        read_custom(str(tmp_path / "deep.jsonl"), COLUMNS)
    with pytest.raises(ValueError, match=r"long.csv, line 2: 10,000,000 characters in column body; must be at most"):
        read_custom(str(write(tmp_path / "long.csv", [("x" * 10_000_000, "y", "no"), *ROWS])), COLUMNS)


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "train.csv")
    with pytest.raises(ValueError, match=r"train.csv: a pipe or device; must be a regular file"):
        read_custom(str(tmp_path), COLUMNS)
