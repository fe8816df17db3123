"""A corpus on disk: made once, in parallel, reused while nothing changes and made anew when anything does."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
from filelock import FileLock

from nystromformer.data.corpus import encoding
from nystromformer.data.corpus.documents import Reading, documents
from nystromformer.data.corpus.encoding import Encoded, Piece, encode
from nystromformer.data.corpus.shards import (
    TOKENS_PER_SHARD,
    Shard,
    damaged,
    open_shard,
    read_description,
    write_description,
    write_shards,
)
from nystromformer.data.lra.parallel import in_order

CHARACTERS_PER_PIECE = 1_000_000
Report = Callable[[float], None]
"""Is told how much of the work is done, from 0 to 1."""


@dataclass(frozen=True)
class Corpus:
    """A tokenised corpus. Copies of it in other processes map the same files."""

    folder: Path
    shards: tuple[Shard, ...] = field(repr=False)
    documents: int
    sentences: int
    tokens: int
    digest: str
    """Of all tokens and their division: equal for equal corpora, wherever they lie and whenever they were made."""

    def __reduce__(self) -> tuple:
        return partial(open_corpus, check=False), (self.folder,)


def open_corpus(folder: Path, check: bool = True) -> Corpus:
    """Raises `ValueError` for a folder with a damaged shard; without `check` its content is not looked at."""
    description = read_description(folder)
    shards = []
    for noted in description["shards"]:
        path = folder / noted["name"]
        shard = open_shard(path)
        if check and shard.digest() != noted["digest"]:
            raise ValueError(damaged(path, "its content is not what was written"))
        shards.append(shard)
    counts = {
        name: sum(noted[name] for noted in description["shards"]) for name in ("documents", "sentences", "tokens")
    }
    return Corpus(folder, tuple(shards), **counts, digest=_digest([noted["digest"] for noted in description["shards"]]))


def fingerprint(files: list[Path], reading: Reading, tokenizer: str) -> str:
    """Of everything that decides what the shards hold: files, how they are read, the tokenizer, our own rules."""
    described = {
        "version": encoding.VERSION,
        "files": [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files],
        "reading": asdict(reading),
        "tokenizer": sha256(tokenizer.encode()).hexdigest(),
    }
    return sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def build_corpus(
    files: list[Path],
    reading: Reading,
    tokenizer: str,
    cache: Path,
    *,
    workers: int | None = None,
    report: Report = lambda share: None,
    tokens_per_shard: int = TOKENS_PER_SHARD,
) -> Corpus:
    """The shards of some files in `cache`, made unless they are there already.

    `tokenizer` is the content of a `tokenizer.json`. A corpus appears in `cache` when it is whole. Of several programs
    that want the same one at a time, one makes it.
    """
    name = f"corpus-{fingerprint(files, reading, tokenizer)}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{name}.lock"):
        if not (cache / name).exists():
            _make(files, reading, tokenizer, cache / name, workers, report, tokens_per_shard)
    return open_corpus(cache / name)


def _make(
    files: list[Path],
    reading: Reading,
    tokenizer: str,
    folder: Path,
    workers: int | None,
    report: Report,
    tokens_per_shard: int,
) -> None:
    aside = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(aside, ignore_errors=True)  # left by a run that was killed; the lock says that no other one writes it
    aside.mkdir()
    try:
        (aside / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        pieces = _pieces(files, reading, str(aside / "tokenizer.json"))
        encoded = _reported(in_order(encode, pieces, workers), report)
        shards = write_shards(aside, encoded, _vocabulary(tokenizer), tokens_per_shard)
        if not shards:
            raise ValueError(empty(files))
        sources = [{"file": str(path), "bytes": path.stat().st_size} for path in files]
        write_description(aside, {"sources": sources, "reading": asdict(reading), "shards": shards})
        os.replace(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def texts_of(files: list[Path], reading: Reading) -> Iterator[tuple[str, float]]:
    """(text, share of the corpus that is read) of each document."""
    sizes = np.array([path.stat().st_size for path in files], dtype=float)
    before = np.cumsum(sizes) - sizes
    for path, size, start in zip(files, sizes, before, strict=True):
        for text, share in documents(path, reading):
            yield text, (start + share * size) / max(sizes.sum(), 1.0)


def empty(files: list[Path]) -> str:
    named = ", ".join(str(path) for path in files[:3]) + (", …" if len(files) > 3 else "")
    return f"the corpus is empty: no document with text in {named}; give files with text."


def _pieces(files: list[Path], reading: Reading, tokenizer: str) -> Iterator[Piece]:
    texts: list[str] = []
    characters, share = 0, 0.0
    for text, share in texts_of(files, reading):
        texts.append(text)
        characters += len(text)
        if characters >= CHARACTERS_PER_PIECE:
            yield Piece(tuple(texts), tokenizer, share)
            texts, characters = [], 0
    if texts:
        yield Piece(tuple(texts), tokenizer, share)


def _reported(encoded: Iterator[Encoded], report: Report) -> Iterator[Encoded]:
    for piece in encoded:
        report(piece.share)
        yield piece
    report(1.0)


def _vocabulary(tokenizer: str) -> int:
    from tokenizers import Tokenizer

    return max(Tokenizer.from_str(tokenizer).get_vocab(with_added_tokens=True).values()) + 1


def _digest(digests: list[str]) -> str:
    return sha256("".join(digests).encode()).hexdigest()[:16]
