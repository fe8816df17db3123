"""What all tasks of Long Range Arena share: their examples, and the kinds of files that these are read from.

Examples are labeled token sequences of different lengths, kept compactly and handed out as padded batches. Files are
tab-separated tables, pictures, and the description that generated data carry; complaints about them name the file, the
line and what to do.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nystromformer.data.hub import check_regular_file
from nystromformer.files import read_object, whole_folder

PADDING = 0
FIRST_TOKEN = 1
"""Ids of tokens start here, so that no token is taken for padding: a black pixel is 1, not 0."""
DESCRIPTION = "dataset.json"
"""Says how a folder was generated and how many examples each part has."""

MASK = PADDING
"""Stands for a masked token. Padding has no other use for its id, since it is masked out of attention: so the encoder
of self-pretraining is the classifier's, without a token more."""

UNMASKED = -100
"""The label of tokens that are not asked for, as everywhere in Transformers."""


@dataclass(frozen=True)
class Sequences:
    """Byte-valued sequences, one after the other in one array: sequence i is `values[ends[i - 1]:ends[i]]`.

    >>> Sequences.of([b"ab", b"cde"])[1]
    array([ 99, 100, 101], dtype=uint8)
    """

    values: np.ndarray  # uint8
    ends: np.ndarray

    @classmethod
    def of(cls, sequences: Iterable[bytes]) -> "Sequences":
        joined, ends = bytearray(), []
        for sequence in sequences:
            joined += sequence
            ends.append(len(joined))
        return cls(np.frombuffer(joined, dtype=np.uint8), np.array(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.values[self.ends[index - 1] if index else 0 : self.ends[index]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)


@dataclass(frozen=True)
class Examples(torch.utils.data.Dataset):
    """A data set for `torch.utils.data.DataLoader`, which asks it for whole batches (`__getitems__`).

    One sequence an example, or two where a pair is to be classified. Examples whose token value 0 means padding, as in
    the released implementation, are made with `zero_is_padding`.

    >>> examples = Examples((Sequences.of([b"ab", b"cde"]),), labels=np.array([0, 1]))
    >>> batch = examples.batch([0, 1])
    >>> batch["input_ids"]
    tensor([[ 98,  99,   0],
            [100, 101, 102]])
    >>> batch["attention_mask"]
    tensor([[ True,  True, False],
            [ True,  True,  True]])
    """

    parts: tuple[Sequences, ...]
    labels: np.ndarray
    index: np.ndarray | None = None  # which examples, in which order; all of them by default
    zero_is_padding: bool = False

    def __len__(self) -> int:
        return len(self.labels if self.index is None else self.index)

    def __getitem__(self, position: int) -> dict[str, Tensor]:
        return self.batch([position])

    def __getitems__(self, positions: Sequence[int]) -> dict[str, Tensor]:
        return self.batch(positions)

    @property
    def lengths(self) -> np.ndarray:
        """The length of each example; of a pair, the longer one."""
        lengths = np.max([part.lengths for part in self.parts], axis=0)
        return lengths if self.index is None else lengths[self.index]

    @property
    def tokens(self) -> np.ndarray:
        """How many tokens each example has; of a pair, both together."""
        tokens = np.sum([part.lengths for part in self.parts], axis=0)
        return tokens if self.index is None else tokens[self.index]

    @property
    def classes(self) -> np.ndarray:
        """The label of each example."""
        return self.labels if self.index is None else self.labels[self.index]

    def choose(self, positions: np.ndarray | slice) -> "Examples":
        """Some of the examples, by position, in the order given."""
        index = np.arange(len(self.labels)) if self.index is None else self.index
        return replace(self, index=index[positions])

    def some(self, count: int | None, seed: int = 0) -> "Examples":
        """At most `count` of the examples, drawn at random, the same for each seed; all for None."""
        if count is None or count >= len(self):
            return self
        return self.choose(np.sort(np.random.default_rng(seed).permutation(len(self))[:count]))

    def batch(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids` (b, n), or (b, 2, n) of pairs, padded to the longest; `labels` (b,).

        `attention_mask`, True for a token, is there only where something is padded: attention is faster without.
        """
        rows = np.asarray(positions) if self.index is None else self.index[np.asarray(positions)]
        sequences = [[part[row] for part in self.parts] for row in rows]
        length = max(len(sequence) for pair in sequences for sequence in pair)
        ids = np.full((len(rows), len(self.parts), length), PADDING, dtype=np.int64)
        for pair, padded in zip(sequences, ids, strict=True):
            for sequence, row in zip(pair, padded, strict=True):
                row[: len(sequence)] = sequence
                row[: len(sequence)] += 0 if self.zero_is_padding else FIRST_TOKEN
        input_ids = torch.from_numpy(ids)
        if len(self.parts) == 1:
            input_ids = input_ids.squeeze(1)
        batch = {"input_ids": input_ids, "labels": torch.from_numpy(self.labels[rows])}
        mask = input_ids != PADDING
        if not mask.all():
            batch["attention_mask"] = mask
        return batch

    def packed(self, positions: Sequence[int]) -> dict[str, Tensor]:
        """`input_ids` (1, n), all sequences one after the other, both of a pair together; `labels` (b,).

        `cu_seq_lens_q` says where each sequence begins and the last one ends.

        >>> examples = Examples((Sequences.of([b"ab", b"cde"]),), labels=np.array([0, 1]))
        >>> examples.packed([1, 0])["input_ids"], examples.packed([1, 0])["cu_seq_lens_q"]
        (tensor([[100, 101, 102,  98,  99]]), tensor([0, 3, 5], dtype=torch.int32))
        """
        if self.zero_is_padding:
            raise ValueError("zero_is_padding=True with packed examples: must be False, since nothing is masked there.")
        rows = np.asarray(positions) if self.index is None else self.index[np.asarray(positions)]
        sequences = [part[row] for row in rows for part in self.parts]
        ends = np.cumsum([0, *map(len, sequences)], dtype=np.int32)
        return {
            "input_ids": torch.from_numpy(np.concatenate(sequences).astype(np.int64) + FIRST_TOKEN)[None],
            "cu_seq_lens_q": torch.from_numpy(ends),
            "labels": torch.from_numpy(self.labels[rows]),
        }


@dataclass(frozen=True)
class MaskedExamples(torch.utils.data.Dataset):
    """For self-pretraining: the inputs of a task without their labels, with some tokens masked.

    Which tokens are masked is a function of (seed, epoch, index) alone. Without an epoch, as in evaluations, the
    same ones each time.

    >>> examples = MaskedExamples(Examples((Sequences.of([b"abcdef"]),), np.array([0])), share=0.5, seed=1)
    >>> examples[0, 0]["input_ids"], examples[0, 0]["labels"]
    (tensor([[ 98,  99,   0, 101,   0,   0]]), tensor([[-100, -100,  100, -100,  102,  103]]))
    """

    examples: Examples
    share: float
    """Of tokens, that are masked on average."""
    seed: int

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def lengths(self) -> np.ndarray:
        return self.examples.lengths

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Tensor]:
        return self.__getitems__([key])

    def __getitems__(self, keys: Sequence[int | tuple[int, int]]) -> dict[str, Tensor]:
        """A batch of examples by their keys: (epoch, index), or the index alone."""
        pairs = [key if isinstance(key, tuple) else (0, key) for key in keys]
        batch = self.examples.batch([index for _, index in pairs])
        ids = batch["input_ids"]
        masked = torch.from_numpy(np.stack([self._draw(*pair, ids[0].shape) for pair in pairs]))
        masked &= batch.get("attention_mask", True)
        labels = torch.where(masked, ids, UNMASKED)
        return batch | {"input_ids": torch.where(masked, MASK, ids), "labels": labels}

    def frequencies(self, vocabulary: int, most: int = 1_000) -> Tensor:
        """The share of each id among the tokens of at most so many examples, as if each had been there once more.

        >>> MaskedExamples(Examples((Sequences.of([bytes([0, 0, 2])]),), np.array([0])), 0.5, 0).frequencies(4)
        tensor([0.1429, 0.4286, 0.1429, 0.2857])
        """
        examples = self.examples.some(most)
        counts = torch.ones(vocabulary, dtype=torch.long)
        for position in range(len(examples)):
            counts += torch.bincount(examples[position]["input_ids"].flatten(), minlength=vocabulary)
        counts[PADDING] = 1
        return counts / counts.sum()

    def _draw(self, epoch: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
        # Column by column, so that how far a batch is padded changes nothing.
        return self.share > np.random.default_rng([self.seed, epoch, index]).random(shape[::-1]).T


@dataclass(frozen=True)
class Splits:
    train: Examples
    dev: Examples
    test: Examples
    departures: tuple[str, ...] = ()
    """What makes the examples another task than that of the paper's numbers, in words."""

    def noted(self) -> dict[str, Any]:
        """As it stands in `config.json` of a run and in its records."""
        departures = {"data_departures": list(self.departures)} if self.departures else {}
        return {"data": self.fingerprint(), **departures}

    def fingerprint(self) -> str:
        """A short hash of all examples, to know the same data again."""
        digest = hashlib.blake2b(digest_size=8)
        for examples in (self.train, self.dev, self.test):
            for part in examples.parts:
                digest.update(part.values.tobytes())
                digest.update(part.ends.tobytes())
            digest.update(examples.labels.tobytes())
            index = np.arange(len(examples)) if examples.index is None else examples.index
            digest.update(index.tobytes())
        return digest.hexdigest()


def as_is(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The collator that goes with `Examples`: its batches are ready."""
    return batch


def hold_out(examples: Examples, count: int, seed: int = 0) -> tuple[Examples, Examples]:
    """Divide examples at random into those that stay and `count` that are held out, the same for each seed."""
    order = np.random.default_rng(seed).permutation(len(examples))
    return examples.choose(np.sort(order[count:])), examples.choose(np.sort(order[:count]))


def table_rows(path: Path, columns: tuple[str, ...], header: bool) -> Iterator[tuple[int, list[bytes]]]:
    """(line number, fields) of each row. With `header` the first line must hold the names of the columns."""
    check_regular_file(path)
    expected = f"{len(columns)} columns separated by tabs ({', '.join(columns)})"
    with open(path, "rb") as file:
        number = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                raise ValueError(
                    f"{path}, line {number}: the file ends in the middle of the line; it was cut short: copy it again, "
                    f"or end the line if it is whole."
                )
            fields = line.rstrip(b"\r\n").split(b"\t")
            if header and number == 1:
                if [field.decode(errors="replace") for field in fields] != list(columns):
                    raise ValueError(f"{path}, line 1: {shown(line)}; must name the {expected}.")
                continue
            if len(fields) != len(columns):
                raise ValueError(
                    f"{path}, line {number}: {len(fields)} columns; must be {expected}: fix or remove the line."
                )
            yield number, fields
        if number <= header:
            raise ValueError(f"{path}: no rows; the file was cut short: copy it again.")


def label_of(field: bytes, classes: int, path: Path, number: int) -> int:
    """A class written as an integer, or as LRA's `1.0`.

    >>> label_of(b"1.0", 2, Path("a.tsv"), 1)
    1
    """
    try:
        label = float(field)
    except ValueError:
        label = -1.0
    if label != int(label) or not 0 <= label < classes:
        raise ValueError(
            f"{path}, line {number}: label {shown(field)}; must be 0 to {classes - 1}: fix or remove the line."
        )
    return int(label)


def shown(text: bytes, length: int = 40) -> str:
    readable = text.decode(errors="replace").strip()
    return repr(readable if len(readable) <= length else readable[:length] + "…")


def pixels_of(source: Path | bytes, name: object, size: int) -> np.ndarray:
    """The gray levels (size, size) of an image file or its bytes; colors by ITU-R 601 luma. `name` is for complaints.

    >>> from PIL import Image
    >>> file = io.BytesIO()
    >>> Image.new("RGB", (2, 2), (255, 0, 0)).save(file, "PNG")
    >>> pixels_of(file.getvalue(), "red", 2)
    array([[76, 76],
           [76, 76]], dtype=uint8)
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            pixels = np.asarray(image.convert("L"))
    except OSError as error:
        raise ValueError(f"{name}: not a whole picture ({error}); copy it again.") from error
    if pixels.shape != (size, size):
        raise ValueError(f"{name}: {pixels.shape[1]}×{pixels.shape[0]} pixels; must be {size}×{size}.")
    return pixels


@contextmanager
def described_folder(out: Path, description: dict[str, Any]) -> Iterator[Path]:
    """A folder to write data into, which becomes `out` with its description when everything is written."""
    with whole_folder(out) as folder:
        yield folder
        (folder / DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def description_of(folder: Path) -> dict[str, Any] | None:
    """What `described_folder` noted about a folder; None for one that was not generated here, such as LRA's own."""
    path = folder / DESCRIPTION
    if not path.exists():
        return None
    try:
        description = {"options": {}, **read_object(path)}
        for name in ("options", "examples"):
            if not isinstance(description.get(name), dict):
                raise ValueError(f"{path}: {name} must be a JSON object.")
    except ValueError as error:
        raise ValueError(f"{error} Generate the data again.") from error
    return description


def check_count(folder: Path, file: Path, part: str, found: int) -> None:
    """Refuse a generated file that has lost some of its examples."""
    description = description_of(folder)
    expected = found if description is None else description["examples"].get(part, found)
    if found != expected:
        raise ValueError(
            f"{file}: {found:,} examples, but {folder / DESCRIPTION} promises {expected:,}; the file was cut short: "
            f"copy it again or generate the data again."
        )


def check_options(folder: Path, options: dict[str, Any]) -> None:
    """Refuse a folder that was generated with other options."""
    description = description_of(folder) or {"options": {}}
    for name, value in options.items():
        made = description["options"].get(name)
        if made != value:
            raise ValueError(
                f"{folder} was made with {name}={made}, but {value} is wanted: remove it, or give the folder with "
                f"--data if it is meant."
            )
