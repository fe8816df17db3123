"""Raw text: which files, their documents, and where sentences end."""

import gzip
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from nystromformer.data.hub import download

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".txt")

COMPRESSED = ".gz"
"""Text and JSON lines may be compressed so."""

HUB_SOURCE = re.compile(r"([\w.-]+/[\w.-]+?)(?::([\w./-]+))?")


def kind_of(path: Path) -> str | None:
    """The suffix that says how a file is read, None for files that can't be.

    >>> kind_of(Path("wiki.JSONL.gz")), kind_of(Path("notes.pdf"))
    ('.jsonl', None)
    """
    path = path.with_suffix("") if path.suffix.lower() == COMPRESSED else path
    return path.suffix.lower() if path.suffix.lower() in SUFFIXES else None


def corpus_files(corpora: Sequence[str], option: str = "--corpus") -> list[Path]:
    """All files of some corpora, in their order. A file that is named twice is read once.

    Each corpus is a file, a folder that is searched with its subfolders, or a data set of the Hub: `owner/name`, or
    `owner/name:folder` for one folder of it, such as `wikimedia/wikipedia:20231101.en`. Errors call them `option`.
    """
    if not corpora:
        raise ValueError(f"no {option}: give at least one file, folder or Hub id.")
    return list(dict.fromkeys(path.resolve() for corpus in corpora for path in _files(corpus, option)))


def _files(corpus: str, option: str) -> list[Path]:
    path = Path(corpus).expanduser()
    if path.is_file():
        if kind_of(path) is None:
            raise ValueError(
                f"{option} {corpus}: its name must end with one of {', '.join(SUFFIXES)} (or these + .gz)."
            )
        return [path]
    if path.is_dir():
        return _files_in(path, corpus, option)
    match = HUB_SOURCE.fullmatch(corpus)
    if match is None or corpus.startswith((".", "~")):
        raise ValueError(f"{option} {corpus}: no such file or folder, and no Hub id (owner/name) either.")
    name, subfolder = match.groups()
    return _files_in(_from_hub(name, subfolder, option), corpus, option)


def _files_in(folder: Path, corpus: str, option: str) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and kind_of(path) is not None)
    found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not found:
        raise ValueError(f"{option} {corpus}: no file in it ends with one of {', '.join(SUFFIXES)} (or these + .gz).")
    return found


def _from_hub(name: str, subfolder: str | None, option: str) -> Path:
    """The local copy of a data set, downloaded if it is not there yet."""
    within = f"{subfolder.strip('/')}/" if subfolder else ""
    patterns = [f"{within}*{suffix}{end}" for suffix in SUFFIXES for end in ("", COMPRESSED)]
    return download(name, patterns=patterns, option=option) / within


DIVISIONS = ("blank-line", "line", "file")
"""What divides a text file into documents. "blank-line" is BERT's format."""

ROWS = 256
"""Rows of a parquet file that are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files are understood."""

    text_column: str = "text"
    """The column of parquet files and JSON lines that holds the document."""
    division: str = "blank-line"

    def __post_init__(self) -> None:
        if self.division not in DIVISIONS:
            raise ValueError(f"--documents {self.division}: must be one of {', '.join(DIVISIONS)}.")


def documents(path: Path, reading: Reading) -> Iterator[tuple[str, float]]:
    """(text, share of the file that is read) for each document; empty ones are left out."""
    read = {".parquet": _parquet, ".txt": _text}.get(str(kind_of(path)), _json_lines)
    try:
        for text, share in read(path, reading):
            if text and not text.isspace():
                # a lone surrogate, which JSON can hold, has no place in UTF-8
                yield text.encode("utf-8", errors="replace").decode("utf-8"), share
    except (OSError, EOFError) as error:
        raise ValueError(f"{path}: can't be read ({error}); copy it again.") from error


def _parquet(path: Path, reading: Reading) -> Iterator[tuple[str, float]]:
    import pyarrow
    from pyarrow import parquet

    column = reading.text_column
    try:
        with parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise ValueError(f"{path}: columns {', '.join(names)}, but no {column!r}; name one with --text-column.")
            total, row = table.metadata.num_rows, 0
            for batch in table.iter_batches(batch_size=ROWS, columns=[column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield _checked(text, f"{path}, row {row}", column), row / total
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole parquet file ({error}); copy it again.") from error


def _json_lines(path: Path, reading: Reading) -> Iterator[tuple[str, float]]:
    for number, line, share in _lines(path):
        if not line:
            continue
        where, column = f"{path}, line {number}", reading.text_column
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error}); must be one JSON object a line.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: a JSON {type(row).__name__}; must be one JSON object a line.")
        if column not in row:
            raise ValueError(f"{where}: fields {', '.join(row)}, but no {column!r}; name one with --text-column.")
        yield _checked(row[column], where, column), share


def _text(path: Path, reading: Reading) -> Iterator[tuple[str, float]]:
    lines: list[str] = []
    share = 0.0
    for _, line, share in _lines(path):
        lines.append(line)
        if reading.division == "line" or (reading.division == "blank-line" and not line):
            yield "\n".join(lines).strip(), share
            lines = []
    yield "\n".join(lines), share


def _lines(path: Path) -> Iterator[tuple[int, str, float]]:
    """(number, line without its end, share of the file that is read)"""
    size = max(path.stat().st_size, 1)
    is_compressed = path.suffix.lower() == COMPRESSED
    with open(path, "rb") as raw, gzip.GzipFile(fileobj=raw) if is_compressed else nullcontext(raw) as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: not text in UTF-8 ({error.reason} at byte {error.start}); convert the "
                    f"file to UTF-8, or leave it out."
                ) from error
            if "\0" in text:
                raise ValueError(f"{path}, line {number}: not text (it has a NUL byte); leave the file out.")
            yield number, text.strip(), min(raw.tell() / size, 1.0)


def _checked(text: object, where: str, column: str) -> str:
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: {column!r} holds a {type(text).__name__}; must be text, see --text-column.")
    return text or ""


CANDIDATE = re.compile(
    r"""[.!?…]+["'”’»)\]]*\s+   # the end of a sentence, perhaps
      | [。！？]+[」』”’）]*\s*    # the end of a sentence
      | \s*\n\s*               # the end of a line
    """,
    re.VERBOSE,
)

LAST_WORD = re.compile(r"([^\W\d_][\w.]*)$")

ABBREVIATIONS = frozenset(
    re.findall(
        r"\S+",
        """
        mr mrs ms dr prof st mt rev hon gov sen rep gen col maj capt cmdr lt sgt jr sr messrs mme
        mlle vs cf ca approx fig figs no nos vol vols pp ed eds e.g i.e al inc ltd co corp dept univ
        assn bros jan feb mar apr jun jul aug sep sept oct nov dec u.s u.k
        """,
    )
)
"""Words whose point ends no sentence, or only by chance."""


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, in order, without the white space between them.

    A line's end is the end of a sentence, unless the text merely wraps there.

    >>> split_sentences('Dr. Smith came at 3.30 p.m. today. "Really?" She left.\\nHistory\\nIt was a long, long\\nday.')
    ['Dr. Smith came at 3.30 p.m. today.', '"Really?"', 'She left.', 'History', 'It was a long, long\\nday.']
    """
    sentences, start = [], 0
    for match in CANDIDATE.finditer(text):
        if _ends_sentence(text, start, match):
            sentences.append(text[start : match.end()].strip())
            start = match.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    mark, following = match[0][0], text[match.end() : match.end() + 1]
    continues = following.islower()
    if mark in "。！？":
        return True
    if mark.isspace():
        return not continues  # a wrapped line continues in lower case
    if "\n" in match[0]:
        return True
    if continues:
        return False
    if mark != "." or match[0].startswith(".."):
        return True
    word = LAST_WORD.search(text, max(start, match.start() - 20), match.start())
    if word is None:
        return True
    is_initial = len(word[1]) == 1 and word[1].isupper() and word[1] != "I"
    return not is_initial and word[1].lower() not in ABBREVIATIONS
