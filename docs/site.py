"""What the site has besides the guides: README, changelog and notebook as pages, and the pictures that pages show.

A guide links to files around it as they are seen on GitHub. Here such a link leads to the page or picture of the site,
where there is one, and to the repository where there is none; a file that does not exist fails the build.
"""

import json
import logging
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
NOTEBOOK = ROOT / "examples" / "first_minutes.ipynb"
PAGES = {ROOT / "README.md": "index.md", ROOT / "CHANGELOG.md": "changelog.md", NOTEBOOK: "first-minutes.md"}
"""Files elsewhere that are pages of the site."""
PICTURES = (".png", ".svg")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, name in PAGES.items():
        text = source.read_text(encoding="utf-8")
        content = notebook_markdown(text) if source == NOTEBOOK else text
        files.append(File.generated(config, name, content=content))
    pages = [*PAGES, *DOCS.glob("*.md")]
    for picture in sorted({path for page in pages for path in linked(page) if path.suffix in PICTURES}):
        if not picture.is_relative_to(DOCS):
            files.append(File.generated(config, str(picture.relative_to(ROOT)), abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = next((path for path, name in PAGES.items() if name == page.file.src_uri), DOCS / page.file.src_uri)
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)  # code has no links
    for place in range(0, len(parts), 2):
        parts[place] = LINK.sub(
            lambda match: match[1] + rewritten(match[2], source, config) + (match[3] or "") + match[4], parts[place]
        )
    return "".join(parts)


def rewritten(link: str, page: Path, config: MkDocsConfig) -> str:
    """Where a link of the file `page` leads on the site."""
    if re.match(r"[a-z]+:", link):
        return link
    target = (page.parent / link).resolve()
    if not target.exists():
        log.warning("%s: links to %s, which does not exist", page.relative_to(ROOT), link)
    if target in PAGES:
        return PAGES[target]
    if target.is_relative_to(DOCS):
        return str(target.relative_to(DOCS))
    place = target.relative_to(ROOT)
    return str(place) if target.suffix in PICTURES else f"{config.repo_url}/blob/main/{place}"


def linked(page: Path) -> list[Path]:
    """The files that a file links to."""
    if page == NOTEBOOK:
        return []
    links = [match[2] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    return [(page.parent / link).resolve() for link in links if not re.match(r"[a-z]+:", link)]


def notebook_markdown(text: str) -> str:
    """The cells of a notebook, without what they printed."""
    blocks = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        blocks.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    return "\n\n".join(blocks) + "\n"
