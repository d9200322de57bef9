"""The committed pages of the reference: `make reference` renews what is generated in them.

Text between the lines `<!-- generated: NAME -->` and `<!-- end -->` is computed from the code, so
that a page reads the same on GitHub and on the site.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tools import commands, pages, python_api, recipe_keys, run_files

PAGES = pages.ROOT / "docs" / "reference"
GENERATORS: dict[str, Callable[[], str]] = {
    "recipe keys": recipe_keys.recipe_page,
    "method keys": recipe_keys.methods_page,
    "certificate keys": recipe_keys.certificates_page,
    "commands": commands.page,
    "exit codes": commands.exit_codes,
    "files of a run": run_files.page,
    "python api": python_api.page,
}
GENERATED = re.compile(r"^<!-- generated: (.+) -->\n(?:.*\n)*?<!-- end -->$", flags=re.M)


def renewed(text: str) -> str:
    """Return a page with each of its generated parts as the code has it now."""

    def part(found: re.Match[str]) -> str:
        body = GENERATORS[found[1]]().strip()
        return f"<!-- generated: {found[1]} -->\n\n{body}\n\n<!-- end -->"

    return GENERATED.sub(part, text)


def stale() -> list[Path]:
    """Return the pages whose generated part differs from the code."""
    found = {path: path.read_text() for path in sorted(PAGES.glob("*.md"))}
    return [path for path, text in found.items() if renewed(text) != text]


if __name__ == "__main__":
    for page in stale():
        page.write_text(renewed(page.read_text()))
        print(page.relative_to(pages.ROOT))
