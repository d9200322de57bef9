"""Pages of the site: their order, links and anchors, and notebooks as Markdown.

A page is a Markdown file or an executed notebook, by its path from the root of the repository.
Nothing here needs Sphinx, so that quick tests can read every page as the site shows it.
"""

from __future__ import annotations

import html
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent.parent
TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
BESIDE = (
    "benchmarks",
    "papers",
    "tests",
)  # whose pages are on the site, and on no shelf but their README
INDEX = "docs/index.md"
SHELVES = ("Tutorials", "How-to", "Explanation", "Reference", "Contributing",
           "The project")  # fmt: skip


@dataclass(frozen=True)
class Page:
    """A page as the site has it: title, anchors of its headings, links as written."""

    path: str
    title: str
    anchors: frozenset[str]
    links: tuple[str, ...]


def sources(root: Path = ROOT) -> list[Path]:
    """Return every page of the site."""
    top = [root / name for name in TOP]
    inside = [*(root / "docs").rglob("*.md"), *(root / "examples").glob("*.ipynb")]
    inside += [path for folder in BESIDE for path in (root / folder).rglob("*.md")]
    return [path for path in [*top, *sorted(inside)] if path.exists()]


def read(path: Path, root: Path = ROOT) -> str:
    """Return a page's Markdown; a notebook is converted, and the index lists all shelves."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        return notebook(json.loads(text))
    if path.relative_to(root).as_posix() == INDEX:
        text += toctrees(text)
    return text


def notebook(content: dict[str, Any]) -> str:
    """Return an executed notebook as Markdown, its outputs as blocks of HTML."""
    parts = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            shown = output.get("data", {})
            if "text/html" in shown:  # one block: it would end at an empty line
                table = re.sub(r"\n\s*\n", "\n", "".join(shown["text/html"]))
                parts.append(f"<div>\n{table}</div>")
            elif "image/png" in shown:
                data = "".join(shown["image/png"]).replace("\n", "")
                parts.append(f'<img alt="figure" src="data:image/png;base64,{data}">')
            else:
                words = "".join(output.get("text", shown.get("text/plain", "")))
                block = html.escape(words).rstrip().replace("\n", "&#10;")
                parts.append(f'<pre class="output">{block}</pre>')
    return "\n\n".join(parts)


# --- the order of pages -----------------------------------------------------------------------


def shelves(index: str) -> dict[str, list[tuple[str, str]]]:
    """Return title and path, from the root, of the pages that each shelf's list in INDEX links."""
    found: dict[str, list[tuple[str, str]]] = {shelf: [] for shelf in SHELVES}
    for heading, body in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", index, flags=re.M):
        for title, link in re.findall(r"^\* \[(.+?)\]\((.+?)\)", body, flags=re.M):
            if heading in found:
                found[heading].append((title, _from_root(INDEX, link)))
    return found


def toctrees(index: str) -> str:
    """Return the directives that put the shelves into the side bar, in the order of INDEX."""
    parts = []
    for shelf, entries in shelves(index).items():
        lines = [f"{title} </{path.rpartition('.')[0]}>" for title, path in entries]
        parts.append("\n".join(["```{toctree}", ":hidden:", f":caption: {shelf}", "", *lines]))
    return "".join(f"\n{part}\n```\n" for part in parts)


# --- links and anchors ------------------------------------------------------------------------


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def parse(path: Path, root: Path = ROOT) -> Page:
    """Return a page's title, anchors and links."""
    from markdown_it import MarkdownIt

    tokens = MarkdownIt("commonmark").enable("table").parse(read(path, root))
    seen: Counter[str] = Counter()
    titles, anchors = [], set()
    for token, inside in itertools.pairwise(tokens):
        if token.type == "heading_open":
            words = "".join(part.content for part in inside.children or ())
            name = slug(words)
            anchors.add(f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
            titles.append(words)
    links = [str(token.attrs[key]) for token in _inside(tokens) for key in ("href", "src")
             if key in token.attrs]  # fmt: skip
    name = path.relative_to(root).as_posix()
    return Page(name, titles[0] if titles else name, frozenset(anchors), tuple(links))


def _inside(tokens: list[Any]) -> Iterator[Any]:
    for token in tokens:
        yield token
        yield from _inside(token.children or [])


def dead_links(found: list[Page], root: Path = ROOT) -> list[str]:
    """Return the links that lead to no file or to no heading: "page: link"."""
    anchors = {page.path: page.anchors for page in found}
    return [f"{page.path}: {link}" for page in found for link in page.links
            if not re.match(r"[a-z][a-z0-9+.-]*:|//", link)
            and not _leads(page, link, anchors, root)]  # fmt: skip


def _leads(page: Page, link: str, anchors: dict[str, frozenset[str]], root: Path) -> bool:
    target, _, anchor = resolve(page.path, link).partition("#")
    if anchor:
        return anchor in anchors.get(target, ())
    return not target.startswith("..") and (root / target).exists()


def resolve(page: str, link: str) -> str:
    """Return what a page's link leads to, from the root: FILE or FILE#ANCHOR."""
    file, sign, anchor = unquote(link).partition("#")
    return f"{_from_root(page, file) if file else page}{sign}{anchor}"


def _from_root(page: str, link: str) -> str:
    """Return the path, from the root, of the file that a page's link names."""
    return Path(os.path.normpath(Path(page).parent / unquote(link).partition("#")[0])).as_posix()
