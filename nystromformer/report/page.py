"""One self-contained HTML page: no network, light and dark, readable on a phone."""

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

STYLE = """
:root { color-scheme: light dark; --ink: #1c2128; --dim: #5c6672; --line: #d9dee4; --paper: #ffffff; --card: #f6f8fa;
        --mark: #0b6e99; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --dim: #9aa4af; --line: #363d46; --paper: #15191e; --card: #1f252c; --mark: #6cc3e8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.2rem; background: var(--paper); color: var(--ink);
       font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: .4rem 0; } h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; }
nav a { margin-right: 1rem; } a { color: var(--mark); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; margin: .6rem 0; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid var(--line); }
tr.ours td { font-weight: 600; }
figure { margin: .8rem 0; background: #ffffff; border: 1px solid var(--line); border-radius: 8px; padding: .5rem; }
figure img { display: block; width: 100%; height: auto; } figcaption { color: #5c6672; font-size: .85rem; }
.gap { border: 1px dashed var(--line); border-radius: 8px; padding: .8rem; color: var(--dim); }
details { background: var(--card); border-radius: 8px; padding: .5rem .8rem; margin: .6rem 0; font-size: .88rem; }
code { font-size: .88em; overflow-wrap: anywhere; } p.note { color: var(--dim); font-size: .9rem; }
"""


@dataclass(frozen=True)
class Picture:
    """An SVG or PNG as a data address, with what it shows."""

    source: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the report. Without a body it is a gap, and says what would fill it."""

    title: str
    tables: tuple[str, ...] = ()
    """Markdown: tables and plain paragraphs."""
    pictures: tuple[Picture, ...] = ()
    provenance: tuple[str, ...] = ()
    """Lines that say what made the figures: command, seed, budget, machine."""
    remedy: str = ""
    """The command that would fill the gap."""
    notes: tuple[str, ...] = field(default=())

    @property
    def is_gap(self) -> bool:
        return not self.tables and not self.pictures


def html_page(title: str, intro: str, sections: Iterable[Section]) -> str:
    sections = list(sections)
    links = "".join(f'<a href="#{anchor(s.title)}">{html.escape(s.title)}</a>' for s in sections)
    body = "\n".join(section_html(section) for section in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n{inline(intro, 'p')}\n"
        f"<nav>{links}</nav>\n{body}\n</body>\n</html>\n"
    )


def markdown_page(title: str, intro: str, sections: Iterable[Section]) -> str:
    parts = [f"# {title}", intro]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [gap_text(section)] if section.is_gap else [*section.tables, *section.notes, *section.provenance]
    return "\n\n".join(parts) + "\n"


def section_html(section: Section) -> str:
    heading = f'<h2 id="{anchor(section.title)}">{html.escape(section.title)}</h2>'
    if section.is_gap:
        return f'<section>{heading}<div class="gap">{inline(gap_text(section), "span")}</div></section>'
    parts = [heading, *(markdown_html(text) for text in section.tables)]
    for picture in section.pictures:
        caption = html.escape(picture.caption)
        parts.append(f'<figure><img src="{picture.source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>')
    parts += [inline(note, 'p class="note"') for note in section.notes]
    if section.provenance:
        lines = "".join(inline(line, "div") for line in section.provenance)
        parts.append(f"<details><summary>What made these figures</summary>{lines}</details>")
    return "<section>" + "\n".join(parts) + "</section>"


def gap_text(section: Section) -> str:
    return f"Not among the given runs. `{section.remedy}` makes it."


def markdown_html(text: str) -> str:
    """The little Markdown that our tables use: pipe tables, headings, paragraphs, `code`.

    >>> markdown_html("| a | b |\\n|---|---|\\n| 1 | `x` |").count("<td>")
    2
    """
    parts = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            parts.append(_table_html(lines))
        elif lines[0].startswith("#"):
            parts.append(inline(lines[0].lstrip("# "), "h3"))
        else:
            parts.append(inline(" ".join(lines), "p"))
    return "\n".join(parts)


def _table_html(lines: list[str]) -> str:
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    header, rows = cells[0], cells[2:]
    head = "".join(inline(cell, "th") for cell in header)
    body = "".join(
        f"<tr{' class=ours' if row[0].startswith('nystrom') else ''}>{''.join(inline(cell, 'td') for cell in row)}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


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
