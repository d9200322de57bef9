"""The documentation as a static site that opens offline: pages, notebooks, API reference.

    python docs/make_site.py [--out site] [--no-api]        what `make docs` calls

Every relative link and every anchor must lead somewhere, or nothing is written. What a page links
to in the repository comes along. Needs `pip install "dpdist[docs]"`: markdown-it-py for the pages,
pdoc for the reference, which it makes of the docstrings.
"""

from __future__ import annotations

import argparse
import html
import importlib
import itertools
import json
import os
import pkgutil
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from dpdist.core.errors import UserError
from dpdist.core.optional_imports import import_extra

ROOT = Path(__file__).resolve().parent.parent
FIRST = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
SHELVES = ("tutorials", "how-to", "explanation", "reference", "evidence")  # in a reader's order
NOT_API = {"__main__", "cli", "recipes"}  # what runs, and no module
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --line: #8885 }}
body {{ font: 1rem/1.55 system-ui, sans-serif; margin: 0; display: flex; flex-wrap: wrap }}
nav {{ flex: 0 0 13rem; padding: 1rem; border-right: 1px solid var(--line) }}
nav a {{ display: block; padding: .1rem 0 }}
main {{ flex: 1 1 30rem; min-width: 0; max-width: 60rem; padding: 1rem 2rem }}
pre, table {{ display: block; overflow-x: auto }}
pre {{ padding: .7rem; border: 1px solid var(--line); border-radius: .3rem }}
td, th {{ padding: .25rem .6rem; border: 1px solid var(--line); text-align: left }}
table {{ border-collapse: collapse }} img {{ max-width: 100% }}
.out {{ border-style: dashed }}
</style><nav aria-label="Pages">{nav}</nav><main>{body}</main></html>
"""


@dataclass(frozen=True)
class Page:
    """path: of its source, from the root. anchors: of its headings. links: as written."""

    path: str
    title: str
    body: str
    anchors: frozenset[str]
    links: tuple[str, ...]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def pages(root: Path = ROOT) -> list[Page]:
    """All of them, rendered, links as they are. Raises UserError without the renderer."""
    markdown = (
        import_extra("markdown_it", "docs", "make docs").MarkdownIt("commonmark").enable("table")
    )
    in_docs = sorted((root / "docs").rglob("*.md"), key=lambda path: (_shelf(path, root), path))
    sources = [*(root / name for name in FIRST), *in_docs]
    found = [_page(path, path.read_text(), markdown, root) for path in sources if path.exists()]
    for path in sorted((root / "examples").glob("*.ipynb")):
        found.append(_page(path, _notebook(json.loads(path.read_text())), markdown, root))
    return found


def _shelf(path: Path, root: Path) -> int:
    """Return the place of a page's folder in `SHELVES`; pages elsewhere come last."""
    name = path.relative_to(root / "docs").parts[0]
    return SHELVES.index(name) if name in SHELVES else len(SHELVES)


def _page(path: Path, text: str, markdown: Any, root: Path) -> Page:
    markdown.options["html"] = path.suffix == ".ipynb"  # made by `_notebook`, and escaped there
    tokens = markdown.parse(text)
    seen: Counter[str] = Counter()
    titles, links = [], []
    for token, inside in itertools.pairwise(tokens):
        if token.type == "heading_open":
            words = "".join(part.content for part in inside.children or ())
            name = slug(words)
            token.attrSet("id", f"{name}-{seen[name]}" if seen[name] else name)
            seen[name] += 1
            titles.append(words)
    anchors = frozenset(str(token.attrGet("id")) for token in tokens if token.attrGet("id"))
    for token in _all(tokens):
        for key in ("href", "src"):
            if key in token.attrs:
                links.append(str(token.attrs[key]))
                token.attrSet(key, _moved(links[-1]))
    body = markdown.renderer.render(tokens, markdown.options, {})
    name = path.relative_to(root).as_posix()
    return Page(name, titles[0] if titles else name, body, anchors, tuple(links))


def _all(tokens: list[Any]) -> Iterator[Any]:
    for token in tokens:
        yield token
        yield from _all(token.children or [])


def _notebook(found: dict[str, Any]) -> str:
    """An executed notebook as Markdown, its outputs as blocks of HTML."""
    parts = []
    for cell in found["cells"]:
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
            else:
                words = "".join(output.get("text", shown.get("text/plain", "")))
                block = html.escape(words).rstrip().replace("\n", "&#10;")
                parts.append(f'<pre class="out">{block}</pre>')
    return "\n\n".join(parts)


def _moved(link: str) -> str:
    """Where a link to a source leads on the site."""
    return link if _outside(link) else re.sub(r"\.(md|ipynb)(?=#|$)", ".html", link)


def _outside(link: str) -> bool:
    return bool(re.match(r"[a-z][a-z0-9+.-]*:|//", link))


def broken(found: list[Page], root: Path = ROOT) -> list[str]:
    """Links that lead nowhere: "page: link"."""
    anchors = {page.path: page.anchors for page in found}
    return [f"{page.path}: {link}" for page in found for link in page.links
            if not _outside(link) and not _leads(page, link, anchors, root)]  # fmt: skip


def _leads(page: Page, link: str, anchors: dict[str, frozenset[str]], root: Path) -> bool:
    there, _, anchor = unquote(link).partition("#")
    target = _target(page, link) if there else page.path
    if anchor:
        return anchor in anchors.get(target, ())
    return not target.startswith("..") and (root / target).exists()


def _target(page: Page, link: str) -> str:
    """The file of a link, from the root."""
    there = unquote(link).partition("#")[0]
    return Path(os.path.normpath(Path(page.path).parent / there)).as_posix()


def write(found: list[Page], out: Path, root: Path = ROOT) -> None:
    """The pages into a folder, each where its source is, and what they link to beside them."""
    for page in found:
        up = "../" * page.path.count("/")
        nav = "".join(
            f'<a href="{up}{_moved(other.path)}">{html.escape(other.title)}</a>' for other in found
        )
        nav += f'<a href="{up}api/index.html">API reference</a>'
        text = PAGE.format(title=html.escape(page.title), nav=nav, body=page.body)
        for name in [_moved(page.path)] + ["index.html"] * (page.path == "README.md"):
            place = out / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        for link in page.links:
            target = "" if _outside(link) or link.startswith("#") else _target(page, link)
            if target and (root / target).is_file() and not target.endswith((".md", ".ipynb")):
                (out / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / target, out / target)


def reference(out: Path) -> None:
    """The API, of the docstrings. Raises UserError without pdoc."""
    pdoc = import_extra("pdoc", "docs", "make docs")
    import dpdist

    found = {module.name for module in pkgutil.iter_modules(dpdist.__path__)} - NOT_API
    rooms = ["dpdist", *sorted(f"dpdist.{name}" for name in found)]
    for module in map(importlib.import_module, rooms):
        for name in getattr(module, "__all__", ()):  # else made on first use, which pdoc is not
            setattr(module, name, getattr(module, name))
    pdoc.render.configure(show_source=False)
    pdoc.pdoc(*rooms, output_directory=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "site")
    parser.add_argument("--no-api", action="store_true")
    arguments = parser.parse_args()
    try:
        found = pages()
        if lost := broken(found):
            raise UserError("links that lead nowhere:\n" + "\n".join(lost))
        write(found, arguments.out)
        if not arguments.no_api:
            reference(arguments.out / "api")
    except UserError as error:
        sys.exit(f"{error}")
    print(arguments.out / "index.html")


if __name__ == "__main__":
    main()
