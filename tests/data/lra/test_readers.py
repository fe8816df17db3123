"""Image, Text and Retrieval: the public layouts, on tiny files and on real copies where there are some."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from real_data import REAL_DATA, needs_real_data

from nystromformer.data.hub import local_folder
from nystromformer.data.lra import TASKS, task_folder
from nystromformer.data.lra.readers import RETRIEVAL_FILES, read_image, read_retrieval, read_text

RNG = np.random.default_rng(0)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_parquet(path: Path, **columns: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)


@pytest.fixture
def cifar(tmp_path):
    folder = tmp_path / "cifar10"
    pictures = [RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(30)]
    images = [{"bytes": png(pixels), "path": "x.png"} for pixels in pictures]
    write_parquet(folder / "plain_text" / "train-00000-of-00002.parquet", img=images[:10], label=list(range(10)))
    write_parquet(folder / "plain_text" / "train-00001-of-00002.parquet", img=images[10:20], label=list(range(10)))
    write_parquet(folder / "plain_text" / "test-00000-of-00001.parquet", img=images[20:], label=list(range(10)))
    return folder, pictures


@pytest.fixture
def imdb(tmp_path):
    folder = tmp_path / "imdb"
    texts = [f"Film number {index}: très bon ÿ" for index in range(40)]
    for part in ("train", "test"):
        write_parquet(folder / "plain_text" / f"{part}-00000-of-00001.parquet", text=texts, label=[0, 1] * 20)
    return folder, texts


@pytest.fixture
def aan(tmp_path):
    folder = tmp_path / "aan"
    folder.mkdir()
    for name in RETRIEVAL_FILES.values():
        rows = [f"{label}\tP99-1051\tW95-0103\tfirst {label}\tsecond, longer {label}\n" for label in ("0", "1", "1.0")]
        (folder / name).write_text("".join(rows))
    return folder


def test_pictures_become_grey_rows(cifar):
    folder, pictures = cifar
    splits = read_image(folder, 1024)
    assert [len(part) for part in (splits.train, splits.dev, splits.test)] == [18, 2, 10]
    example = splits.test[3]
    luma = (pictures[23].astype(float) @ [0.299, 0.587, 0.114]).flatten()
    assert np.abs(example["input_ids"][0].numpy() - 1 - luma).max() <= 1
    assert example["labels"].tolist() == [3]
    assert splits.dev[1]["labels"].tolist() == [9], "the development part is the end of the training part"


def test_texts_become_bytes_and_a_tenth_is_held_out(imdb):
    folder, texts = imdb
    splits = read_text(folder, 4000)
    assert [len(part) for part in (splits.train, splits.dev, splits.test)] == [36, 4, 40]
    assert bytes((splits.test[7]["input_ids"][0] - 1).tolist()).decode() == texts[7]
    held_out = {tuple(splits.dev[i]["input_ids"][0].tolist()) for i in range(4)}
    assert held_out.isdisjoint(tuple(splits.train[i]["input_ids"][0].tolist()) for i in range(36))
    assert read_text(folder, 10).train.lengths.max() == 10


def test_the_release_develops_on_the_test_part(imdb):
    splits = read_text(imdb[0], 4000, dev_is_test=True)
    assert splits.dev is splits.test
    assert len(splits.train) == 40


def test_pairs_come_side_by_side(aan):
    splits = read_retrieval(aan, 4000)
    assert splits.departures == ("another set, of 3 pairs",), "the released one has 147,086"
    batch = splits.dev.batch([0, 1, 2])
    assert batch["labels"].tolist() == [0, 1, 1]
    assert batch["input_ids"].shape == (3, 2, len("second, longer 1.0"))
    first = batch["input_ids"][2, 0][batch["attention_mask"][2, 0]]
    assert bytes((first - 1).tolist()) == b"first 1.0"
    assert splits.dev.lengths.tolist() == [16, 16, 18]


@pytest.mark.parametrize(
    "row, message",
    [
        ("1\ta\tb\ttext\n", r"test.tsv, line 4: 4 columns; must be 5 columns separated by tabs \(label, id1"),
        ("2\ta\tb\ttext\ttext\n", r"test.tsv, line 4: label '2'; must be 0 to 1"),
        ("yes\ta\tb\ttext\ttext\n", r"test.tsv, line 4: label 'yes'; must be 0 to 1"),
        ("1\ta\tb\ttext\t\n", r"test.tsv, line 4: an empty text"),
        ("1\ta\tb\ttext\tte", r"test.tsv, line 4: the file ends in the middle of the line"),
    ],
)
def test_damaged_pairs_are_named_with_their_line(aan, row, message):
    with open(aan / "new_aan_pairs.test.tsv", "a") as file:
        file.write(row)
    with pytest.raises(ValueError, match=message):
        read_retrieval(aan, 4000)


def test_a_missing_part_is_named_with_what_is_there(aan):
    (aan / "new_aan_pairs.eval.tsv").unlink()
    with pytest.raises(ValueError, match=r"eval.tsv: no such file; .* holds new_aan_pairs.test.tsv, new_aan"):
        read_retrieval(aan, 4000)


def test_damaged_parquet_is_named(cifar, imdb, tmp_path):
    path = imdb[0] / "plain_text" / "test-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"test-00000-of-00001.parquet: not a whole parquet file .* copy it again"):
        read_text(imdb[0], 4000)
    path.unlink()
    with pytest.raises(ValueError, match=r"imdb: no test-\*.parquet in it or in its subfolders"):
        read_text(imdb[0], 4000)
    with pytest.raises(ValueError, match=r"train-.*columns text, label; must have img, label"):
        read_image(imdb[0], 1024)


def test_wrong_values_in_parquet_are_named_with_their_row(tmp_path):
    image_folder, text_folder = tmp_path / "image", tmp_path / "text"
    good = {"bytes": png(np.zeros((32, 32), dtype=np.uint8)), "path": None}
    small = {"bytes": png(np.zeros((8, 8), dtype=np.uint8)), "path": None}
    cut = {"bytes": good["bytes"][:40], "path": None}
    for column, label, message in (
        ([good, good], [0, 10], r"row 2: label 10; must be 0 to 9"),
        ([good, small], [0, 1], r"row 2: 8×8 pixels; must be 32×32"),
        ([good, cut], [0, 1], r"row 2: not a whole picture"),
    ):
        write_parquet(image_folder / "train-0.parquet", img=column, label=label)
        with pytest.raises(ValueError, match=message):
            read_image(image_folder, 1024)
    write_parquet(text_folder / "train-0.parquet", text=["good", None], label=[0, 1])
    with pytest.raises(ValueError, match=r"train-0.parquet, row 2: text None"):
        read_text(text_folder, 1024)


def test_data_is_a_folder_or_on_the_hub(tmp_path, monkeypatch):
    assert local_folder(str(tmp_path)) == tmp_path
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="a file; must be a folder"):
        local_folder(str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"nowhere/at/all: no such folder; there is no folder"):
        local_folder("nowhere/at/all")
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"as a data set of the Hub it can't be had \(no route\); download it where"):
        local_folder("stanfordnlp/imdb")


def unreachable(*_, **__):
    raise ConnectionError("no route")


def test_folders_of_tasks_are_found_by_either_name(tmp_path):
    (tmp_path / "imdb").mkdir()
    assert task_folder(tmp_path, "text") == tmp_path / "imdb"
    assert task_folder(tmp_path, "image") is None


@needs_real_data
@pytest.mark.parametrize(
    "name, sizes, length",
    [("text", (22_500, 2_500, 25_000), 4_000), ("image", (45_000, 5_000, 10_000), 1024), ("retrieval", None, 4_000)],
)
def test_real_copies_are_read(name, sizes, length):
    splits = TASKS[name].read(task_folder(REAL_DATA, name), length)
    found = tuple(len(part) for part in (splits.train, splits.dev, splits.test))
    assert sizes is None or found == sizes
    for part in (splits.train, splits.dev, splits.test):
        assert part.lengths.max() <= length
        labels = part.some(400).batch(range(400))["labels"]
        assert set(labels.tolist()) <= set(range(TASKS[name].classes))
        assert labels.float().mean() == pytest.approx((TASKS[name].classes - 1) / 2, rel=0.25)
