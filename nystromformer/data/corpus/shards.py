"""A corpus as shards of token ids, built once per tokenizer and kept."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from filelock import FileLock
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from nystromformer.data.corpus.text import Reading, documents, split_sentences
from nystromformer.data.parallel import in_order
from nystromformer.data.tokenizers import read_tokenizer, train_tokenizer
from nystromformer.files import whole_folder, write_text

ENCODING_VERSION = 1
"""Counts changes to this file or `sentences.py` that change what comes out."""


@dataclass(frozen=True)
class Piece:
    """Some documents of a corpus, and the tokenizer that they are for."""

    texts: Sequence[str]
    tokenizer: str
    """Path of its `tokenizer.json`."""
    share: float
    """How much of the corpus is read when this piece is."""


@dataclass(frozen=True)
class Encoded:
    """Documents as tokens, one after the other. Ends are counted from the first token, or sentence, of the piece."""

    ids: np.ndarray
    """Token ids, uint32."""
    sentence_ends: np.ndarray
    """Where each sentence ends among the tokens."""
    document_ends: np.ndarray
    """Where each document ends among the sentences."""
    hashes: np.ndarray
    """Of each document's text, uint64: it decides to which part the document belongs."""
    share: float


def encode(piece: Piece) -> Encoded:
    """Tokenize the sentences of each document, without special tokens. Documents without a token are left out."""
    tokenizer = _tokenizer(piece.tokenizer)
    ids: list[int] = []
    sentence_ends: list[int] = []
    document_ends: list[int] = []
    hashes: list[int] = []
    for text in piece.texts:
        before = len(sentence_ends)
        for sentence in tokenizer.encode_batch_fast(split_sentences(text), add_special_tokens=False):
            if sentence.ids:
                ids += sentence.ids
                sentence_ends.append(len(ids))
        if len(sentence_ends) > before:
            document_ends.append(len(sentence_ends))
            hashes.append(text_hash(text))
    return Encoded(
        np.array(ids, dtype=np.uint32),
        np.array(sentence_ends, dtype=np.int64),
        np.array(document_ends, dtype=np.int64),
        np.array(hashes, dtype=np.uint64),
        piece.share,
    )


def text_hash(text: str) -> int:
    """64 bits that depend on the text alone: not on the seed, the machine, or the other documents.

    >>> text_hash("The same today and tomorrow.")
    12644105517405329614
    """
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> Tokenizer:
    tokenizer = Tokenizer.from_file(path)
    # Files from sentence embedders and classifiers cut and pad what they encode.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "[MASK]" in a text is text
    return tokenizer


DESCRIPTION = "corpus.json"

TOKENS_PER_SHARD = 1 << 25


@dataclass(frozen=True)
class Shard:
    """Views of a mapped file: nothing is read until it is used."""

    ids: np.ndarray
    """All tokens, document after document."""
    sentence_ends: np.ndarray
    """Where each sentence ends in `ids`."""
    document_ends: np.ndarray
    """Where each document ends in `sentence_ends`."""
    hashes: np.ndarray

    def digest(self) -> str:
        """Of what the shard says, whichever version of Arrow wrote it."""
        parts = (self.ids.astype(np.uint32, copy=False), self.sentence_ends, self.document_ends, self.hashes)
        return sha256(b"".join(sha256(part.tobytes()).digest() for part in parts)).hexdigest()


def open_shard(path: Path) -> Shard:
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).get_batch(0)
        ids, ends, hashes = (table.column(name) for name in ("ids", "sentence_ends", "hash"))
        return Shard(
            ids=ids.values.to_numpy(),
            sentence_ends=ends.values.to_numpy(),
            document_ends=ends.offsets.to_numpy()[1:],
            hashes=hashes.to_numpy(),
        )
    except (pa.ArrowException, OSError, KeyError, IndexError) as error:
        raise ValueError(damaged(path, str(error))) from error


def write_shard(path: Path, pieces: list[Encoded], dtype: np.dtype) -> dict[str, Any]:
    """Write some pieces as one shard. Returns what the description says about it."""
    ids = np.concatenate([piece.ids for piece in pieces]).astype(dtype)
    sentence_ends = _joined([piece.sentence_ends for piece in pieces])
    document_ends = _joined([piece.document_ends for piece in pieces])
    hashes = np.concatenate([piece.hashes for piece in pieces])
    columns = {
        "ids": _lists(ids, sentence_ends[document_ends - 1]),
        "sentence_ends": _lists(sentence_ends, document_ends),
        "hash": pa.array(hashes),
    }
    batch = pa.record_batch(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    return {
        "name": path.name,
        "documents": len(document_ends),
        "sentences": len(sentence_ends),
        "tokens": len(ids),
        "digest": Shard(ids, sentence_ends, document_ends, hashes).digest(),
    }


def _joined(ends: list[np.ndarray]) -> np.ndarray:
    """Ends counted from the start of each piece → from the start of all."""
    starts = np.cumsum([0, *(each[-1] for each in ends[:-1])])
    return np.concatenate([each + start for each, start in zip(ends, starts, strict=True)]).astype(np.int32)


def _lists(values: np.ndarray, ends: np.ndarray) -> pa.ListArray:
    return pa.ListArray.from_arrays(np.concatenate(([0], ends)).astype(np.int32), pa.array(values))


def write_shards(folder: Path, encoded: Iterable[Encoded], vocabulary: int, tokens_per_shard: int) -> list[dict]:
    """Write pieces as shards of about so many tokens. Returns what the description says about each."""
    dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
    written: list[dict[str, Any]] = []
    waiting: list[Encoded] = []

    def write() -> None:
        if waiting:
            written.append(write_shard(folder / f"shard-{len(written):05}.arrow", waiting, dtype))
            waiting.clear()

    for piece in encoded:
        if len(piece.ids):
            waiting.append(piece)
        if sum(len(each.ids) for each in waiting) >= tokens_per_shard:
            write()
    write()
    return written


def write_description(folder: Path, description: dict[str, Any]) -> None:
    text = json.dumps(description, indent=2, ensure_ascii=False)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def read_description(folder: Path) -> dict[str, Any]:
    path = folder / DESCRIPTION
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(damaged(path, str(error))) from error


def damaged(path: Path, reason: str) -> str:
    return (
        f"{path}: damaged ({reason}); remove the folder {path.parent} and run again: it is made anew from the corpus, "
        f"and a run can be resumed with it."
    )


CHARACTERS_PER_PIECE = 1_000_000

TellShare = Callable[[float], None]
"""Is told how much of the work is done, from 0 to 1."""


@dataclass(frozen=True)
class Corpus:
    """A tokenized corpus. Copies of it in other processes map the same files."""

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
        "version": ENCODING_VERSION,
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
    report: TellShare = lambda share: None,
    tokens_per_shard: int = TOKENS_PER_SHARD,
) -> Corpus:
    """The shards of some files in `cache`, made unless they are there already.

    `tokenizer` is the content of a `tokenizer.json`. A corpus appears in `cache` when it is whole. Of several programs
    that want the same one at a time, one makes it.
    """
    name = f"corpus-{fingerprint(files, reading, tokenizer)}"
    with _one_at_a_time(cache, name):
        if not (cache / name).exists():
            _make(files, reading, tokenizer, cache / name, workers, report, tokens_per_shard)
    return open_corpus(cache / name)


@contextmanager
def _one_at_a_time(cache: Path, name: str) -> Iterator[None]:
    """Keep other programs from making the same. Where nothing could be made, nothing of it stays."""
    made = [folder for folder in (cache, *cache.parents) if not folder.exists()]
    cache.mkdir(parents=True, exist_ok=True)
    lock = cache / f".{name}.lock"
    try:
        with FileLock(lock):
            yield
    except BaseException:
        lock.unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):  # others have written there
                folder.rmdir()
        raise


def _make(
    files: list[Path],
    reading: Reading,
    tokenizer: str,
    folder: Path,
    workers: int | None,
    report: TellShare,
    tokens_per_shard: int,
) -> None:
    with whole_folder(folder) as aside:
        (aside / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        pieces = _pieces(files, reading, str(aside / "tokenizer.json"))
        encoded = _reported(in_order(encode, pieces, workers), report)
        shards = write_shards(aside, encoded, _vocabulary(tokenizer), tokens_per_shard)
        if not shards:
            raise ValueError(empty(files))
        sources = [{"file": str(path), "bytes": path.stat().st_size} for path in files]
        write_description(aside, {"sources": sources, "reading": asdict(reading), "shards": shards})


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


def _reported(encoded: Iterator[Encoded], report: TellShare) -> Iterator[Encoded]:
    for piece in encoded:
        report(piece.share)
        yield piece
    report(1.0)


def _vocabulary(tokenizer: str) -> int:
    from tokenizers import Tokenizer

    return max(Tokenizer.from_str(tokenizer).get_vocab(with_added_tokens=True).values()) + 1


def _digest(digests: list[str]) -> str:
    return sha256("".join(digests).encode()).hexdigest()[:16]


VOCABULARY_VERSION = 1
"""Counts changes to `train_tokenizer` that change what comes out."""


def corpus_tokenizer(
    files: list[Path], reading: Reading, vocab_size: int, cache: Path, report: TellShare = lambda share: None
) -> PreTrainedTokenizerFast:
    """The tokenizer for some files in `cache`, trained unless it is there already."""
    name = f"tokenizer-{fingerprint(files, reading, f'trained {VOCABULARY_VERSION} {vocab_size}')}.json"
    with _one_at_a_time(cache, name):
        if not (cache / name).exists():
            _train(files, reading, vocab_size, cache / name, report)
    return read_tokenizer(cache / name)


@dataclass(frozen=True)
class Texts:
    """The documents of some files, as often as they are gone through."""

    files: list[Path]
    reading: Reading
    report: TellShare

    def __iter__(self) -> Iterator[str]:
        for text, share in texts_of(self.files, self.reading):
            self.report(share)
            yield text


def _train(files: list[Path], reading: Reading, vocab_size: int, path: Path, report: TellShare) -> None:
    texts = Texts(files, reading, report)
    if next(iter(texts), None) is None:
        raise ValueError(empty(files))
    tokenizer = train_tokenizer(texts, vocab_size)
    write_text(path, tokenizer.backend_tokenizer.to_str(pretty=True))
