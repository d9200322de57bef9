"""The part of the site that needs Sphinx: generated text, notebooks, and recipe keys as objects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from pydantic import BaseModel
from sphinx import addnodes
from sphinx.application import Sphinx

from tools import pages


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = pages.read(Path(app.env.doc2path(docname)))


def _signature(env: Any, text: str, node: addnodes.desc_signature) -> str:
    """Write a recipe key, its section less strongly than its name. Returns the whole key."""
    key, _, kind = text.partition(" ")
    section, dot, name = key.rpartition(".")
    if dot:
        node += addnodes.desc_addname(text, section + dot)
    node += addnodes.desc_name(text, name)
    if kind:
        node += addnodes.desc_annotation(text, f" {kind}")
    return text


def _docstring(
    app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    """Make a docstring, whose backticks are Markdown's, reStructuredText; examples stay."""
    for number, line in enumerate(lines):
        if line.strip() == "Example:":
            break
        parts = re.split(r"(``?.+?``?)", line)
        parts[::2] = [re.sub(r"(?<!\\)([|*])", r"\\\1", part) for part in parts[::2]]
        parts[1::2] = [f"``{part.strip('`')}``" for part in parts[1::2]]
        lines[number] = "".join(parts)


def _signature_of_section(
    app: Sphinx, what: str, name: str, found: Any, options: Any, text: str, returned: str
) -> tuple[str, None] | None:
    """Return the short signature of a recipe's section, whose fields are keys of a recipe."""
    section = isinstance(found, type) and issubclass(found, BaseModel)
    return ("(**values)", None) if section else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Register all of it with Sphinx."""
    app.add_source_suffix(".ipynb", "markdown")
    app.add_object_type("recipe-key", "recipe-key", "pair: %s; recipe key", _signature,
                        nodes.literal, "recipe key")  # fmt: skip
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", _signature_of_section)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
