"""The files of a run folder as Markdown: their names, and the keys of those with a shape."""

from __future__ import annotations

import importlib
import inspect
import re
import types
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from dpdist.core.fields import FileShape
from dpdist.runs.folder import FileIn, RunFolder
from tools.recipe_keys import documented

# The modules that define shapes of files.
MODULES = (
    "dpdist.runs.folder",
    "dpdist.runs.archive",
    "dpdist.tuning.manifest",
    "dpdist.cluster.job_folder",
    "dpdist.certification.certificate",
    "dpdist.release.tables",
    "dpdist.runs.accounting",
    "dpdist.models.spec",
)


def page() -> str:
    """Return a table of the files that `RunFolder` names, then the shapes."""
    rows = [(each.path, each.__doc__ or "", name) for name, each in vars(RunFolder).items()
            if isinstance(each, FileIn)]  # fmt: skip
    lines = ["## Files of a run", "", "| file | content | of a `RunFolder` |", "|---|---|---|"]
    lines += [f"| `{path}` | {text} | `{name}` |" for path, text, name in rows]
    parts = ["\n".join(lines), "## Keys of the files"]
    for shape in shapes():
        text = inspect.cleandoc(shape.__doc__ or "")
        before = re.split(r"^Attributes:", text, flags=re.M)[0].strip()
        parts.append(f"### {shape.__name__}\n\n{before}")
        newest = shape.newest_format
        if newest is not None:
            parts.append(f"This version reads `format` up to {newest}.")
        entries = documented(shape.__doc__ or "")
        table = ["| key | type | meaning |", "|---|---|---|"]
        for name, field in shape.model_fields.items():
            said = entries.get(name) or field.description or ""
            table.append(f"| `{name}` | {type_words(field.annotation)} | {said} |")
        parts.append("\n".join(table))
    return "\n\n".join(parts)


def shapes() -> list[type[FileShape]]:
    """Return every shape of a file that dpdist defines, in the order of its module."""
    found = []
    for module in map(importlib.import_module, MODULES):
        for each in vars(module).values():
            here = getattr(each, "__module__", "") == module.__name__
            if here and isinstance(each, type) and issubclass(each, FileShape):
                found.append(each)
    return found


def type_words(annotation: Any) -> str:
    """Return a JSON type in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        words = [type_words(each) for each in inner if each is not type(None)]
        return " or ".join(dict.fromkeys(words)) + ", or null" * (type(None) in inner)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"object ({annotation.__name__})"
    if origin in (list, tuple, set, frozenset):
        return "list"
    if origin is dict or annotation is dict:
        return "object"
    if origin is not None and inner:
        return type_words(inner[0])
    words = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any"}
    return words.get(annotation, str(annotation))
