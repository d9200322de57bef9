"""The part of the site that needs Sphinx: notebooks, and the order of pages in the side bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from tools import pages


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = pages.read(Path(app.env.doc2path(docname)))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register both with Sphinx."""
    app.add_source_suffix(".ipynb", "markdown")
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
