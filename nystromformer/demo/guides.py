"""This project's own guides as passages to search: the checkout's `docs/`, or the copy that a wheel brings."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import nystromformer
from nystromformer.errors import UserError

INSTALLED = "share/nystromformer/guides"
"""Where a wheel puts the guides, below the environment's prefix."""
FEWEST, MOST = 257, 400
"""Tokens of a passage: more than what is computed exactly whatever the attention, and less than a model reads."""
NO_PROSE = re.compile(r"^```[\s\S]*?^```|^:::.*(?:\n {4,}.*)*|^\|.*$|^!\[.*$", flags=re.MULTILINE)
"""Code, references made from docstrings, tables and pictures."""


@dataclass(frozen=True)
class Passage:
    """Some paragraphs of a guide, named by the guide and the heading that they begin under."""

    title: str
    text: str


def guides_folder() -> Path:
    for distribution in metadata.distributions(name="nystromformer-torch"):
        for file in distribution.files or ():
            if INSTALLED in file.as_posix() and (path := Path(str(file.locate()))).is_file():
                return path.parent
    checkout = Path(nystromformer.__file__).parents[1] / "docs"
    if (checkout / "how-it-works.md").is_file():
        return checkout
    raise UserError(
        f"this installation has no guides to search, neither in {INSTALLED} nor in {checkout}; install it again."
    )


def read_passages(folder: Path, count_tokens: Callable[[str], int]) -> list[Passage]:
    """The prose of all guides that have enough, whole paragraphs of about `FEWEST` to `MOST` tokens together."""
    guides = {path.stem: _prose(path) for path in sorted(folder.glob("*.md"))}
    long = {name: prose for name, prose in guides.items() if count_tokens(prose) >= FEWEST}
    return [passage for name, prose in long.items() for passage in passages_of(name, prose, count_tokens)]


def passages_of(name: str, prose: str, count_tokens: Callable[[str], int]) -> Iterator[Passage]:
    """What is too short to stand alone at the end of a guide joins the passage before."""
    done: list[tuple[str, list[str]]] = []
    title, held, count = name, list[str](), 0
    for heading, paragraph in _paragraphs(prose):
        own = count_tokens(paragraph)
        if count >= FEWEST and (heading is not None or count + own > MOST):
            done.append((title, held))
            held, count = [], 0
        if heading is not None or not held:
            title = title if held else f"{name} › {heading or title.rpartition(' › ')[2]}"
        held.append(paragraph)
        count += own
    if count >= FEWEST or not done:
        done.append((title, held))
    else:
        done[-1][1].extend(held)
    for title, paragraphs in done:
        if paragraphs:
            yield Passage(title, "\n".join(paragraphs))


def _prose(guide: Path) -> str:
    text = NO_PROSE.sub("", guide.read_text(encoding="utf-8"))
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links are their words
    return text.replace("`", "").replace("**", "")


def _paragraphs(prose: str) -> Iterator[tuple[str | None, str]]:
    """Each paragraph in one line, with the heading that stands before it, if one does."""
    heading = None
    for block in re.split(r"\n\s*\n", prose):
        if match := re.fullmatch(r"#+ +(.*)", block.strip()):
            heading = match[1]
        elif block.strip():
            words = " ".join(block.split())
            yield heading, f"{heading}. {words}" if heading else words
            heading = None
