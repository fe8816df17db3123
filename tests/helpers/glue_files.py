"""Small files in the layouts of GLUE and IMDB, with the quirks that the published ones have."""

from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

MNLI = ["index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse",
        "sentence2_parse", "sentence1", "sentence2"]  # fmt: skip
STSB = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2"]
GOOD, BAD = ("good", "fine", "great"), ("bad", "poor", "awful")
SIZES = {"train": 24, "dev": 8, "test": 5}


def sentence(index: int) -> str:
    """Tells its label, `index % 2`, by one word; every fifth has a lone quotation mark."""
    word = (GOOD if index % 2 else BAD)[index % 3]
    return f"the {word} film {'is' * (index % 4)} number {index}{' said ' + chr(34) if index % 5 == 0 else ''}"


def write_tsv(path: Path, header: list[str] | None, rows: list[list[object]], mark: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(map(str, row)) for row in ([header] if header else []) + rows]
    path.write_text(mark + "\n".join(lines) + "\n", encoding="utf-8")


def write_parquet(path: Path, **columns: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)


def write_official(root: Path) -> Path:
    """All GLUE tasks, each part with its own header."""
    for part, size in SIZES.items():
        for name, (header, rows) in official_parts(part, range(size)).items():
            write_tsv(root / f"{name}.tsv", header, rows, mark="\ufeff" if name == "MRPC/dev" else "")
    return root


def official_parts(part: str, numbers: range) -> dict[str, tuple[list[str] | None, list[list[object]]]]:
    """(header, rows) of each task's file for a part. Test parts have no labels."""
    labeled = part != "test"
    names = ("entailment", "not_entailment")
    pairs = [[sentence(i), sentence(i + 1)] for i in numbers]
    label = ["label"] * labeled
    numbered = [[i, *pair] for i, pair in zip(numbers, pairs, strict=True)]
    named = [row + [names[row[0] % 2]] * labeled for row in numbered]
    found = {
        f"QNLI/{part}": (["index", "question", "sentence", *label], named),
        f"RTE/{part}": (["index", "sentence1", "sentence2", *label], named),
        f"WNLI/{part}": (["index", "sentence1", "sentence2", *label], [r + [r[0] % 2] * labeled for r in numbered]),
        f"STS-B/{part}": (
            [*STSB, *["score"] * labeled],
            [[i, *"abcdef", a, b] + [f"{i % 6}.250"] * labeled for i, a, b in numbered],
        ),
        f"MRPC/{part}": (
            ["Quality" if labeled else "index", "#1 ID", "#2 ID", "#1 String", "#2 String"],
            [[i % 2 if labeled else i, 7, 8, a, b] for i, a, b in numbered],
        ),
    }
    if labeled:
        found[f"SST-2/{part}"] = ["sentence", "label"], [[a, i % 2] for i, a, _ in numbered]
        found[f"CoLA/{part}"] = None, [["gj04", i % 2, "" if i % 2 else "*", a] for i, a, _ in numbered]
        qqp = [[i, 3, 4, a, b, i % 2] for i, a, b in numbered]
        qqp.insert(3, [9, 3, 4, "a question that a tab has cut"])
        found[f"QQP/{part}"] = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"], qqp
    else:
        found |= {
            f"{task}/{part}": (["index", "sentence"], [row[:2] for row in numbered]) for task in ("SST-2", "CoLA")
        }
        found[f"QQP/{part}"] = ["id", "question1", "question2"], numbered
    judges = {"train": ["label1"], "dev": [f"label{k}" for k in range(1, 6)], "test": []}[part]
    gold = [*judges, "gold_label"] if labeled else []
    mnli = [
        [i, *"abcdefg", a, b] + [(*names[:1], "neutral", "contradiction")[i % 3]] * len(gold) for i, a, b in numbered
    ]
    for name in ("train",) if part == "train" else (f"{part}_matched", f"{part}_mismatched"):
        found[f"MNLI/{name}"] = [*MNLI, *gold], mnli
    return found


def write_hub(root: Path) -> Path:
    """Some tasks of GLUE, and IMDB, whose rows are sorted by label."""
    for part, size in (("train", 24), ("validation", 8), ("test", 5)):
        rows, file = range(size), f"{part}-00000-of-00001.parquet"
        labels = [-1] * size if part == "test" else [i % 2 for i in rows]
        texts = [sentence(i) for i in rows]
        write_parquet(root / "sst2" / file, sentence=texts, label=labels, idx=list(rows))
        write_parquet(root / "stsb" / file, sentence1=texts, sentence2=texts[::-1], label=[float(x) for x in labels],
                      idx=list(rows))  # fmt: skip
        for name in [part] if part == "train" else [f"{part}_matched", f"{part}_mismatched"]:
            write_parquet(root / "mnli" / f"{name}-00000-of-00001.parquet", premise=texts, hypothesis=texts[::-1],
                          label=labels, idx=list(rows))  # fmt: skip
    write_imdb(root / "imdb")
    return root


def write_imdb(folder: Path, size: int = 20) -> Path:
    order = sorted(range(size), key=lambda i: i % 2)
    for part in ("train", "test"):
        write_parquet(folder / "plain_text" / f"{part}-00000-of-00001.parquet", text=[sentence(i) * 3 for i in order],
                      label=[i % 2 for i in order])  # fmt: skip
    return folder
