"""GLUE in its official files and in the Hub's, and IMDB."""

from pathlib import Path

import numpy as np
import pytest
from glue_files import sentence, write_hub, write_imdb, write_official, write_parquet, write_tsv
from real_data import REAL_DATA, needs_real_data

from nystromformer.data.glue import TASKS, read_task, task_name
from nystromformer.data.glue.readers import official_part

GLUE = [name for name, task in TASKS.items() if task.official is not None]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return write_official(tmp_path_factory.mktemp("data") / "glue")


@pytest.mark.parametrize("name", GLUE)
def test_official_files_of_each_task(root, name):
    splits = read_task(name, str(root))
    task = TASKS[name]
    assert len(splits.train) == 24
    assert splits.train.first[5] == sentence(5), "a lone quotation mark is text"
    assert splits.train.second is None or splits.train.second[5] == sentence(6)
    assert list(splits.dev) == list(task.dev)
    assert list(splits.test) == list(task.test)
    if name == "stsb":
        assert splits.train.labels[:3].tolist() == [0.25, 1.25, 2.25]
    else:
        classes = len(task.labels)
        assert splits.train.labels[:6].tolist() == [i % classes for i in range(6)]
    for part in splits.test.values():
        assert part.labels is None
        assert part.index == ["0", "1", "2", "3", "4"]
    for part in splits.dev.values():
        assert len(part) == len(part.labels) == 8


def test_rows_that_lack_columns_are_counted_in_qqp_and_refused_elsewhere(root, tmp_path):
    assert read_task("qqp", str(root)).train.left_out == 1
    path = tmp_path / "train.tsv"
    write_tsv(path, ["sentence", "label"], [["fine", 1], ["cut"]])
    with pytest.raises(ValueError, match=r"train.tsv, line 3: 1 columns; must be the 2 .*sentence, label.*remove"):
        official_part(path, TASKS["sst2"], TASKS["sst2"].official)


@pytest.mark.parametrize("place", ["", "SST-2"])
def test_a_task_is_found_from_its_own_folder_and_from_those_above(root, place):
    assert len(read_task("sst2", str(root / place)).dev["dev"]) == 8
    assert len(read_task("sst2", str(root.parent)).dev["dev"]) == 8


def test_the_layouts_of_the_hub(tmp_path):
    root = write_hub(tmp_path)
    official = read_task("sst2", str(write_official(tmp_path / "official")))
    splits = read_task("sst2", str(root / "sst2"))
    assert splits.train.first == official.train.first
    assert splits.train.labels.tolist() == official.train.labels.tolist()
    assert splits.test["test"].labels is None
    mnli = read_task("mnli", str(root))
    assert list(mnli.dev) == ["dev_matched", "dev_mismatched"]
    assert read_task("stsb", str(root)).dev["dev"].labels.dtype == np.float32


def test_a_tenth_of_imdb_is_held_out_and_its_test_part_has_labels(tmp_path):
    splits = read_task("imdb", str(write_imdb(tmp_path / "imdb", size=40)))
    assert (len(splits.train), len(splits.dev["dev"]), len(splits.test["test"])) == (36, 4, 40)
    assert set(splits.dev["dev"].first).isdisjoint(splits.train.first)
    assert splits.test["test"].labels.mean() == 0.5
    assert 0.3 < splits.train.some(20).labels.mean() < 0.7, "rows are sorted by label: a subset must be drawn"


@pytest.mark.parametrize(
    "rows, message",
    [
        ([["fine", 2]], r"train.tsv, line 2: label '2'; must be one of 0, 1"),
        ([["fine", 1], ["  ", 0]], r"train.tsv, line 3: the text in column sentence is empty; .*remove the row"),
        ([], r"train.tsv: no rows; the file was cut short"),
    ],
)
def test_wrong_rows_are_named(tmp_path, rows, message):
    path = tmp_path / "train.tsv"
    write_tsv(path, ["sentence", "label"], rows)
    with pytest.raises(ValueError, match=message):
        official_part(path, TASKS["sst2"], TASKS["sst2"].official)


def test_missing_columns_files_and_encodings_are_named(tmp_path):
    path = tmp_path / "train.tsv"
    write_tsv(path, ["text", "label"], [["fine", 1]])
    with pytest.raises(ValueError, match=r"line 1: columns text, label; must have sentence, label \(sentence mis"):
        official_part(path, TASKS["sst2"], TASKS["sst2"].official)
    write_tsv(path, ["index", "sentence"], [[0, "fine"]])
    with pytest.raises(ValueError, match=r"\(label missing\): is it the official file"):
        official_part(path, TASKS["sst2"], TASKS["sst2"].official)
    path.write_bytes(b"sentence\tlabel\nna\xefve\t1\n")
    with pytest.raises(ValueError, match=r"train.tsv: not UTF-8"):
        official_part(path, TASKS["sst2"], TASKS["sst2"].official)
    write_tsv(path, ["sentence", "label"], [["fine", 1]])
    with pytest.raises(ValueError, match=r"dev.tsv: no such file; .* holds train.tsv"):
        read_task("sst2", str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: no train-\*.parquet .*copy of SST-2 from the Hub, or the official"):
        read_task("sst2", str(tmp_path / "empty"))


def test_wrong_parquet_is_named(tmp_path):
    path = tmp_path / "train-0.parquet"
    for columns, message in (
        ({"sentence": ["a", "b"], "label": [0, -1]}, r"row 2: label -1; .* Is this a part without labels"),
        ({"sentence": ["a", None], "label": [0, 1]}, r"row 2: the text in column sentence is empty"),
        ({"text": ["a"], "label": [0]}, r"columns text, label; must have sentence, label \(sentence missing\)"),
    ):
        write_parquet(path, **columns)
        with pytest.raises(ValueError, match=message):
            read_task("sst2", str(tmp_path))
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"train-0.parquet: not a whole parquet file"):
        read_task("sst2", str(tmp_path))


def test_names_are_known_however_they_are_written():
    assert all(task_name(task.title) == name for name, task in TASKS.items())


def test_the_same_data_is_known_again(root):
    one, two = (read_task("rte", str(root)).fingerprint() for _ in range(2))
    assert one == two != read_task("sst2", str(root)).fingerprint()


REAL = {"sst2": (67_349, 872, 1_821), "mrpc": (3_668, 408, 1_725), "cola": (8_551, 1_043, 1_063),
        "rte": (2_490, 277, 3_000), "stsb": (5_749, 1_500, 1_379), "wnli": (635, 71, 146),
        "imdb": (22_500, 2_500, 25_000)}  # fmt: skip


@needs_real_data
@pytest.mark.parametrize("name", REAL)
def test_real_copies_are_read(name):
    splits = read_task(name, str(REAL_DATA))
    assert (len(splits.train), len(splits.dev["dev"]), len(splits.test["test"])) == REAL[name]


@needs_real_data
def test_real_qnli_is_read():
    texts = official_part(REAL_DATA / "glue" / "QNLI" / "dev.tsv", TASKS["qnli"])
    assert len(texts) == 5_463
    assert texts.labels.mean() == pytest.approx(0.5, abs=0.02)
