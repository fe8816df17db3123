"""Which files a corpus consists of: given as files, folders or data sets of the Hub."""

import re
from collections.abc import Sequence
from pathlib import Path

SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".txt")
COMPRESSED = ".gz"
"""Text and JSON lines may be compressed so."""
HUB_ID = re.compile(r"([\w.-]+/[\w.-]+?)(?::([\w./-]+))?")


def kind_of(path: Path) -> str | None:
    """The suffix that says how a file is read, None for files that can't be.

    >>> kind_of(Path("wiki.JSONL.gz")), kind_of(Path("notes.pdf"))
    ('.jsonl', None)
    """
    path = path.with_suffix("") if path.suffix.lower() == COMPRESSED else path
    return path.suffix.lower() if path.suffix.lower() in SUFFIXES else None


def corpus_files(corpora: Sequence[str]) -> list[Path]:
    """All files of some corpora, in their order. A file that is named twice is read once.

    Each corpus is a file, a folder that is searched with its subfolders, or a data set of the Hub: `owner/name`, or
    `owner/name:folder` for one folder of it, such as `wikimedia/wikipedia:20231101.en`.
    """
    if not corpora:
        raise ValueError("no --corpus: give at least one file, folder or Hub id.")
    return list(dict.fromkeys(path.resolve() for corpus in corpora for path in _files(corpus)))


def _files(corpus: str) -> list[Path]:
    path = Path(corpus).expanduser()
    if path.is_file():
        if kind_of(path) is None:
            raise ValueError(
                f"--corpus {corpus}: its name must end with one of {', '.join(SUFFIXES)} (or these + .gz)."
            )
        return [path]
    if path.is_dir():
        return _files_in(path, corpus)
    match = HUB_ID.fullmatch(corpus)
    if match is None or corpus.startswith((".", "~")):
        raise ValueError(f"--corpus {corpus}: no such file or folder, and no Hub id (owner/name) either.")
    return _files_in(_from_hub(*match.groups()), corpus)


def _files_in(folder: Path, corpus: str) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and kind_of(path) is not None)
    found = [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    if not found:
        raise ValueError(f"--corpus {corpus}: no file in it ends with one of {', '.join(SUFFIXES)} (or these + .gz).")
    return found


def _from_hub(name: str, subfolder: str | None) -> Path:
    """The local copy of a data set, downloaded if it is not there yet."""
    from huggingface_hub import snapshot_download

    within = f"{subfolder.strip('/')}/" if subfolder else ""
    patterns = [f"{within}*{suffix}{end}" for suffix in SUFFIXES for end in ("", COMPRESSED)]
    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=patterns)) / within
    except Exception as error:  # the Hub's, the network's and the cache's errors have nothing else in common
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"--corpus {name}: no such file or folder, and as a data set of the Hub it can't be had ({reason}); "
            f"download it where the Hub can be reached and give its folder."
        ) from error
