"""The public API as Markdown with the directives of autodoc, in the order of reference/api.md."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import dpdist

PAGE = Path(__file__).resolve().parent.parent / "reference" / "api.md"


def marks() -> dict[str, str]:
    """Return the mark (stable, experimental) of each name that the page lists."""
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE.read_text(), flags=re.M))


def page() -> str:
    """Return a heading and the docstring of each name that there is."""
    parts = ["## Every name in full"]
    for name, mark in marks().items():
        parts.append(f"### {name}\n\n*{mark}*\n\n```{{eval-rst}}\n{_directive(name)}\n```")
    return "\n\n".join(parts)


def _directive(name: str) -> str:
    """Return the directive of a name, without importing the module that defines it."""
    spec = importlib.util.find_spec(dpdist._LAZY[name])
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    (found,) = [node for node in tree.body if getattr(node, "name", None) == name]
    if isinstance(found, ast.FunctionDef):
        return f".. autofunction:: dpdist.{name}"
    assert isinstance(found, ast.ClassDef)
    if "Exception" in map(ast.unparse, found.bases):
        return f".. autoexception:: dpdist.{name}"
    own = f".. autoclass:: dpdist.{name}\n   :members:"
    inherits = "PublicViews" in map(ast.unparse, found.bases)  # of no other library
    return f"{own}\n   :inherited-members:" if inherits else own
