"""One self-contained HTML page, and the same as Markdown."""

import base64
import html
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nystromformer.report.style import STYLE

KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
LONG_CELL = 40
"""A cell of more characters than this is broken into lines."""


@dataclass(frozen=True)
class Picture:
    """An SVG or PNG file, with what it shows. SVGs are plots, whose colours may follow the reader's scheme."""

    path: Path
    caption: str
    wide: bool = False
    """Takes a whole row, and is scrolled where the screen is narrower than it can be read."""

    @property
    def data_address(self) -> str:
        """The picture inside the page itself."""
        return f"data:{KINDS[self.path.suffix]};base64,{base64.b64encode(self.path.read_bytes()).decode()}"


@dataclass(frozen=True)
class Part:
    """Markdown, of tables and plain paragraphs, and the pictures below it."""

    text: str
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Section:
    """A chapter of the report. Without parts it is a gap, and says what would fill it."""

    title: str
    parts: tuple[Part, ...] = ()
    provenance: tuple[str, ...] = ()
    """Lines that say what made the figures: command, seed, budget, machine."""
    notes: tuple[str, ...] = ()
    remedy: str = ""
    """The command that would fill the gap."""

    @property
    def is_gap(self) -> bool:
        return not self.parts


def html_page(title: str, intro: str, sections: Iterable[Section]) -> str:
    sections = list(sections)
    links = "".join(_link(section) for section in sections)
    body = "\n".join(section_html(section) for section in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n'
        f"{inline(intro, 'p')}\n<nav>{links}</nav>\n{body}\n</body>\n</html>\n"
    )


def markdown_page(title: str, intro: str, sections: Iterable[Section], folder: Path) -> str:
    """Pictures are linked as they are seen from `folder`."""
    blocks = [f"# {title}", intro]
    for section in sections:
        blocks.append(f"## {section.title}")
        if section.is_gap:
            blocks.append(gap_text(section))
        for part in section.parts:
            blocks.append(part.text.strip())
            blocks += [f"![{picture.caption}]({_seen_from(folder, picture.path)})" for picture in part.pictures]
        blocks += [*section.notes, *section.provenance]
    return "\n\n".join(blocks) + "\n"


def section_html(section: Section) -> str:
    heading = f'<h2 id="{anchor(section.title)}">{html.escape(section.title)}</h2>'
    if section.is_gap:
        return f'<section>{heading}<div class="gap">{inline(gap_text(section), "span")}</div></section>'
    blocks = [heading]
    for part in section.parts:
        blocks.append(markdown_html(part.text))
        if part.pictures:
            blocks.append(f'<div class="figures">{"".join(map(picture_html, part.pictures))}</div>')
    blocks += [inline(note, 'p class="note"') for note in section.notes]
    if section.provenance:
        lines = "".join(inline(line, "div") for line in section.provenance)
        blocks.append(f'<div class="made"><b>What made these figures</b>{lines}</div>')
    return "<section>" + "\n".join(blocks) + "</section>"


def picture_html(picture: Picture) -> str:
    caption = html.escape(picture.caption)
    kind = ("plot" if picture.path.suffix == ".svg" else "map") + (" wide" if picture.wide else "")
    image = f'<img src="{picture.data_address}" alt="{caption}">'
    return f'<figure class="{kind}"><div>{image}</div><figcaption>{caption}</figcaption></figure>'


def gap_text(section: Section) -> str:
    return f"Not among the given runs. `{section.remedy}` makes it."


def markdown_html(text: str) -> str:
    """The little Markdown that our tables use: pipe tables, headings, paragraphs, `code`.

    >>> markdown_html("| a | b |\\n|---|---|\\n| 1 | `x` |").count("<td")
    2
    """
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        level = len(lines[0]) - len(lines[0].lstrip("#"))
        if lines[0].startswith("|"):
            blocks.append(_table_html(lines))
        elif level:
            blocks.append(inline(lines[0].lstrip("# "), f"h{max(level, 3)}"))
        else:
            blocks.append(inline(" ".join(lines), "p"))
    return "\n".join(blocks)


def _table_html(lines: list[str]) -> str:
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    header, rows = cells[0], cells[2:]
    kinds = [_column_kind(column) for column in zip(*rows, strict=True)] or [""] * len(header)
    head = "".join(inline(cell, f"th{kind}") for cell, kind in zip(header, kinds, strict=True))
    body = "".join(
        f"<tr{_ours(row)}>{''.join(inline(cell, f'td{kind}') for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _column_kind(column: tuple[str, ...]) -> str:
    """Numbers are aligned at the right, words at the left; long cells are broken into lines."""
    if any(len(cell) > LONG_CELL for cell in column):
        return ' class="long"'
    return "" if any(re.match(r"[\d–]", cell) for cell in column) else ' class="words"'


def _ours(row: list[str]) -> str:
    return ' class="ours"' if re.match(r"nystrom(-local)?(-\d+)?$", row[0]) else ""


def _link(section: Section) -> str:
    missing = ' class="missing"' if section.is_gap else ""
    return f'<a href="#{anchor(section.title)}"{missing}>{html.escape(section.title)}</a>'


def _seen_from(folder: Path, path: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()


def inline(text: str, tag: str) -> str:
    """`text` escaped, with `code` marked up, inside a tag."""
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return f"<{tag}>{escaped}</{tag.split()[0]}>"


def anchor(title: str) -> str:
    """
    >>> anchor("Long Range Arena")
    'long-range-arena'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
