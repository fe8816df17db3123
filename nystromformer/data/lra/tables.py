"""Reading LRA's tab-separated files: every complaint names the file, the line and what to do."""

from collections.abc import Iterator
from pathlib import Path


def rows_of(path: Path, columns: tuple[str, ...], header: bool) -> Iterator[tuple[int, list[bytes]]]:
    """(line number, fields) of each row. With `header` the first line must hold the names of the columns."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file; {nearby(path)}")
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
                    f"{path}, line {number}: {len(fields)} columns; must be {expected}: mend or remove the line."
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
            f"{path}, line {number}: label {shown(field)}; must be 0 to {classes - 1}: mend or remove the line."
        )
    return int(label)


def shown(text: bytes, length: int = 40) -> str:
    text = text.decode(errors="replace").strip()
    return repr(text if len(text) <= length else text[:length] + "…")


def nearby(path: Path) -> str:
    """What is there instead of a missing file, to guess the mistake from."""
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either."
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    listed = ", ".join(names[:6]) + (", …" if len(names) > 6 else "")
    return f"{folder} holds {listed or 'nothing'}."
