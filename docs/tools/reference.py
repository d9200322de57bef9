"""Write the generated part of the pages in docs/reference, as plain Markdown that GitHub shows.

    make reference     # after a change of recipe keys, commands, files of a run or public objects

The site has the same text with objects that its search finds: `pages.expand` generates it anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from tools import pages, python_api

PAGES = pages.ROOT / "docs" / "reference"


def plain(text: str) -> str:
    """Return generated Markdown with items of lists in place of the site's directives."""
    text = re.sub(r"^```\{program\} .*\n```\n*", "", text, flags=re.M)
    text = re.sub(
        r"^```\{recipe-key\} (.+)\n(.*)\n\n((?:(?!```).*\n)*)```$", _key, text, flags=re.M
    )
    text = re.sub(r"^```\{option\} (.+)\n((?:(?!```).*\n)*)```$", _option, text, flags=re.M)
    return re.sub(r"(^\* .*)\n\n(?=\* )", r"\1\n", text, flags=re.M)  # one list


def _key(found: re.Match[str]) -> str:
    name, kind = re.fullmatch(r"(\S+)( \(.*\))?", found[1]).groups()  # type: ignore[union-attr]
    return f"* **`{name}`**{kind or ''}: {found[2]}. {' '.join(found[3].split())}"


def _option(found: re.Match[str]) -> str:
    return f"* `{found[1]}`: {' '.join(found[2].split())}"


def renewed(text: str) -> str:
    """Return a page with each of its generated parts as the code has it now."""

    def part(found: re.Match[str]) -> str:
        name = found[1]
        made = python_api.markdown() if name == "python api" else plain(pages.GENERATORS[name]())
        return f"<!-- generated: {name} -->\n\n{made.strip()}\n\n<!-- end -->"

    return pages.GENERATED.sub(part, text)


def stale() -> list[Path]:
    """Return the pages whose generated part is not what the code has."""
    found = {path: path.read_text() for path in sorted(PAGES.glob("*.md"))}
    return [path for path, text in found.items() if renewed(text) != text]


if __name__ == "__main__":
    for page in stale():
        page.write_text(renewed(page.read_text()))
        print(page.relative_to(pages.ROOT))
