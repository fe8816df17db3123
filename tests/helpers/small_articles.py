"""A small encoder and short articles in files, for scripts that read such."""

import runpy
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
from encoders import build
from transformers import BertTokenizerFast

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "birds"]


def write_model(folder):
    build("bert").save_pretrained(folder)
    (folder / "words.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    BertTokenizerFast(vocab_file=str(folder / "words.txt"), model_max_length=512).save_pretrained(folder)


def write_articles(folder, texts):
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "articles.parquet")


def run_script(monkeypatch, name, *arguments):
    """As `python benchmarks/name arguments` would; gives the names that the script defines."""
    script = BENCHMARKS / name
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    return runpy.run_path(str(script), run_name="__main__")
