"""Token ids in memory-mapped Arrow files, with a description that tells a whole corpus from a damaged one.

A shard is an Arrow IPC file with one row a document: `ids` (its tokens), `sentence_ends` (where its sentences end among
all tokens of the shard) and `hash`. Any Arrow reader opens it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa

from nystromformer.data.corpus.encoding import Encoded

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
        return sha256(b"".join(sha256(np.ascontiguousarray(part)).digest() for part in parts)).hexdigest()


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


def write_shard(path: Path, pieces: list[Encoded], dtype: np.dtype) -> dict[str, object]:
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
    written, waiting = [], []

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


def write_description(folder: Path, description: dict[str, object]) -> None:
    text = json.dumps(description, indent=2, ensure_ascii=False)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def read_description(folder: Path) -> dict[str, object]:
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
