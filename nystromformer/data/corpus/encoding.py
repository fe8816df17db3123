"""Documents → token ids and the ends of their sentences, in a process of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from tokenizers import Tokenizer

from nystromformer.data.corpus.sentences import split_sentences

VERSION = 1
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
    """Tokenise the sentences of each document, without special tokens. Documents without a token are left out."""
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
