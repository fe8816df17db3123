"""What a table is: cells, a header, and the rows to look at first. Rendered as Markdown, in a terminal, and as HTML.

A table knows its highlighted rows and its columns of words, so that nothing is guessed from the text of a cell. HTML
is made by the page's template; here is what the other two need: text that says the same whatever it holds. The end
of the file has what the cells of several tables share.
"""

import re
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nystromformer.paper import attention_family

OURS = ("nystrom", "nystrom-local")
"""The attentions whose rows are highlighted, whatever their size."""
MISSING = "–"
NO_RUN = "No finished run.\n"


class Code(str):
    """A part of a text that stands for itself: a name, or a command to type."""


Text = str | tuple[str, ...]
"""Plain words, or such words and `Code` in turn."""


@dataclass(frozen=True)
class Table:
    """A header and rows of cells, which may be anything with a text.

    >>> print(Table(["n", "time"], [[512, "1 ms"]]).markdown())
    | n | time |
    |---|---|
    | 512 | 1 ms |
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    highlight: Collection[int] = ()
    """The places of rows to look at first."""
    words: Collection[str] = ()
    """Columns of words, aligned at the left; so is the first column always."""
    title: Text = ""
    note: Text = ""
    """What explains the cells."""

    def __post_init__(self) -> None:
        cells = [tuple(map(printable, row)) for row in (self.header, *self.rows)]
        if len(set(map(len, cells))) > 1:
            raise ValueError(
                f"a table of {len(self.header)} columns got rows of {sorted({len(row) for row in cells})}."
            )
        object.__setattr__(self, "header", cells[0])
        object.__setattr__(self, "rows", cells[1:])

    @property
    def columns(self) -> list[tuple[str, bool]]:
        """Names, and whether words stand there."""
        return [(name, place == 0 or name in self.words) for place, name in enumerate(self.header)]

    def markdown(self) -> str:
        """The grid alone; `tables_markdown` has title and note, too."""
        lines = ["| " + " | ".join(markdown_text(cell) for cell in row) + " |" for row in (self.header, *self.rows)]
        return "\n".join([lines[0], "|" + "---|" * len(self.header), *lines[1:]])


def tables_markdown(tables: Iterable[Table]) -> str:
    """Titles, grids and notes of tables, one after another."""
    blocks = []
    for table in tables:
        blocks += [f"**{markdown_text(table.title)}**"] if table.title else []
        blocks += [table.markdown(), *([markdown_text(table.note)] if table.note else [])]
    return "\n\n".join(blocks) + "\n" if blocks else NO_RUN


def print_tables(tables: Iterable[Table]) -> None:
    """For a terminal, in whose width cells are broken. Anything else gets lines as long as they need to be."""
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text as Line

    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    tables = list(tables)
    for table in tables:
        grid = Grid(title=Line(plain_text(table.title)), title_justify="left")
        for name, words in table.columns:
            grid.add_column(Line(name), justify="left" if words else "right")
        for place, row in enumerate(table.rows):
            grid.add_row(*(Line(cell) for cell in row), style="bold" if place in table.highlight else None)
        console.print(grid)
        if table.note:
            console.print(Line(plain_text(table.note)), style="dim")
    if not tables:
        console.print(NO_RUN, end="")


def printable(value: object) -> str:
    """The text of a cell on one line: what moves the cursor, turns the direction or is half a character is a space.

    >>> printable("two\\nlines\\u202e")
    'two lines '
    """
    return "".join(character if character.isprintable() else " " for character in str(value))


def text_parts(text: Text) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


def plain_text(text: Text) -> str:
    return printable("".join(text_parts(text)))


def markdown_text(text: Text) -> str:
    """Says in Markdown what `text` says, whatever it holds: no markup, HTML or link of its own.

    >>> markdown_text(("a|b <i> [x](y) ", Code("c`d")))
    'a\\\\|b &lt;i> [x]\\\\(y) ``c`d``'
    """
    return "".join(_code(part) if isinstance(part, Code) else _escaped(part) for part in text_parts(text))


def _escaped(text: str) -> str:
    text = re.sub(r"([\\`|*])|(?<=])(?=[\[(:])", r"\\\1", printable(text))
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _code(text: str) -> str:
    text = printable(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def is_ours(attention: str) -> bool:
    """
    >>> is_ours("nystrom-local-64"), is_ours("nystrom-attention")
    (True, False)
    """
    return attention_family(attention) in OURS


def exact_first(attentions: Iterable[str]) -> list[str]:
    """Each once, as they come, but what the others are compared with first.

    >>> exact_first(["nystrom-64", "linear", "standard", "linear"])
    ['standard', 'nystrom-64', 'linear']
    """
    return sorted(dict.fromkeys(attentions), key=lambda attention: attention != "standard")


def with_published(values: Sequence[float], published: float | None) -> str:
    """Mean ± standard deviation of percentages, and the paper's.

    >>> with_published([36.0, 38.0], 37.15), with_published([36.0], None), with_published([], 37.15)
    ('37.00 ± 1.41 (37.15)', '36.00', '– (37.15)')
    """
    ours = f"{statistics.mean(values):.2f}" if values else MISSING
    if len(values) > 1:
        ours += f" ± {statistics.stdev(values):.2f}"
    return ours if published is None else f"{ours} ({published:.2f})"
