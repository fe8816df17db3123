"""Files, folders and Hub ids become documents; what can't be read is named with its place and the remedy."""

import gzip
import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from nystromformer.data.corpus.text import Reading, corpus_files, documents


def read(path, **options):
    return [text for text, _ in documents(path, Reading(**options))]


def test_all_kinds_of_files_hold_the_same_documents(tmp_path):
    texts = ["The first.\nIt has two lines.", "Très bon, 漢字."]
    parquet.write_table(pa.table({"title": ["a", "b", "c"], "text": [*texts, None]}), tmp_path / "a.parquet")
    lines = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in [*texts, " "])
    (tmp_path / "b.jsonl").write_text(lines)
    (tmp_path / "c.txt").write_text("\ufeff" + "\n\n\n".join(texts), encoding="utf-8")
    with gzip.open(tmp_path / "d.json.gz", "wt", encoding="utf-8") as file:
        file.write(lines + "\n")
    files = corpus_files([str(tmp_path)])
    assert [path.name for path in files] == ["a.parquet", "b.jsonl", "c.txt", "d.json.gz"]
    for path in files:
        assert read(path) == texts
        assert [share for _, share in documents(path, Reading())][-1] > 0.6
    assert read(tmp_path / "c.txt", division="line") == ["The first.", "It has two lines.", texts[1]]
    assert len(read(tmp_path / "c.txt", division="file")) == 1
    assert read(tmp_path / "a.parquet", text_column="title") == ["a", "b", "c"]


def test_corpora_keep_their_order_and_files_are_read_once(tmp_path):
    for name in ("b.txt", "a.txt", "deep/c.txt", ".hidden.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    given = [str(tmp_path / "b.txt"), str(tmp_path)]
    assert [path.name for path in corpus_files(given)] == ["b.txt", "a.txt", "c.txt"]


def test_a_lone_surrogate_does_not_stop_a_corpus(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "half a sign \\ud83d here"}\n')
    assert read(tmp_path / "a.jsonl") == ["half a sign ? here"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"fine\n\xff\xfe\x00", r"a.txt, line 2: not text in UTF-8 \(invalid start byte at byte 0\)"),
        ("a.txt", b"fine\nnot\x00fine", r"a.txt, line 2: not text \(it has a NUL byte\); leave the file out"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', r"a.jsonl, line 2: not JSON .*; must be one JSON object a line"),
        ("a.json", b'["a", "b"]', r"a.json, line 1: a JSON list; must be one JSON object a line"),
        ("a.jsonl", b'{"body": "a"}', r"a.jsonl, line 1: fields body, but no 'text'; name one with --text-column"),
        ("a.jsonl", b'{"text": 3}', r"a.jsonl, line 1: 'text' holds a int; must be text"),
        ("a.parquet", b"PAR1 cut short", r"a.parquet: not a whole parquet file .*; copy it again"),
        (
            "a.txt.gz",
            gzip.compress(bytes(range(32, 127)) * 9, mtime=0)[:60],
            r"a.txt.gz: can't be read .*; copy it again",
        ),
        ("a.jsonl.gz", b"plain", r"a.jsonl.gz: can't be read .*; copy it again"),
    ],
)
def test_damaged_files_are_named_with_their_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_wrong_columns_and_divisions_are_named(tmp_path):
    parquet.write_table(pa.table({"body": ["a"], "label": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="columns body, label, but no 'text'; name one with --text-column"):
        read(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="row 1: 'label' holds a int"):
        read(tmp_path / "a.parquet", text_column="label")
    with pytest.raises(ValueError, match="--documents page: must be one of blank-line, line, file"):
        Reading(division="page")


def test_what_is_no_corpus_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.pdf").write_text("")
    cases = {
        "no --corpus": [],
        "a.pdf: its name must end with one of .parquet": [str(tmp_path / "a.pdf")],
        "no file in it ends with one of": [str(tmp_path)],
        "no such file or folder, and no Hub id": [str(tmp_path / "missing.txt")],
        "as a data set of the Hub it can't be had .no route.; download it": ["wikimedia/wikipedia:20231101.en"],
    }
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    for message, given in cases.items():
        with pytest.raises(ValueError, match=message):
            corpus_files(given)


def unreachable(*_, **__):
    raise ConnectionError("no route")


def test_a_folder_of_a_hub_data_set(tmp_path, monkeypatch):
    (tmp_path / "20231101.en").mkdir()
    (tmp_path / "20231101.en" / "train.parquet").write_text("")
    asked = {}

    def download(name, **options):
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert [path.name for path in corpus_files(["wikimedia/wikipedia:20231101.en"])] == ["train.parquet"]
    assert asked["name"] == "wikimedia/wikipedia"
    assert "20231101.en/*.parquet" in asked["allow_patterns"]
