"""Small corpora and a tokenizer for them, made in place."""

import json
import re
from pathlib import Path

import numpy as np

WORDS = re.findall(
    r"\w+", "time stone river house light paper voice winter garden letter morning silver window forest music bread"
)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, ".", *WORDS]


def sentence(rng: np.random.Generator, words: int) -> str:
    return " ".join(rng.choice(WORDS, words)).capitalize() + "."


def texts(count: int, seed: int = 0, sentences: int = 12, longest: int = 12) -> list[str]:
    """Documents of different lengths, one of them with a single sentence."""
    rng = np.random.default_rng(seed)
    made = [
        " ".join(sentence(rng, rng.integers(2, longest)) for _ in range(rng.integers(2, sentences)))
        for _ in range(count - 1)
    ]
    return [sentence(rng, 5), *made]


def write_vocabulary(folder: Path, words: list[str] = VOCABULARY) -> Path:
    path = folder / "vocab.txt"
    path.write_text("\n".join(words) + "\n")
    return path


def write_json_lines(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path
