"""The public API as Markdown, in the order of reference/api.md."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import dpdist
from tools.recipe_keys import plain

_TITLES = ("Guarantee", "Args", "Attributes", "Returns", "Yields", "Raises", "Source", "Example")
PAGE = Path(__file__).resolve().parent.parent / "reference" / "api.md"


def marks() -> dict[str, str]:
    """Return the mark (stable, experimental) of each name that the page lists."""
    return dict(re.findall(r"^\| \[`(\w+)`\]\(#[\w-]+\) \| (\w+) \|", PAGE.read_text(), flags=re.M))


def page() -> str:
    """Return signature and docstring of each name, and of the public methods of classes."""
    parts = ["## Every name in full"]
    for name, mark in marks().items():
        found = getattr(dpdist, name)
        parts += [f"### {name}", f"*{mark}*", *_object(found, f"dpdist.{name}")]
        if inspect.isclass(found):
            for method, each in _members(found):
                parts += [f"#### {name}.{method}", *_object(each, f"{name}.{method}")]
    return "\n\n".join(parts)


def _members(found: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class defines, in the order of its source."""
    for name, each in vars(found).items():
        inner = getattr(each, "fget", None) or getattr(each, "func", None)
        inner = inner or getattr(each, "__func__", each)
        if not name.startswith("_") and inspect.isfunction(inner) and inner.__doc__:
            yield name, each


def _object(found: Any, name: str) -> Iterator[str]:
    value = getattr(found, "fget", None) or getattr(found, "func", None)  # of a property
    found = value or getattr(found, "__func__", found)
    if value is None:
        yield f"```python\n{_signature(found, name)}\n```"
    yield from _docstring(inspect.cleandoc(found.__doc__ or ""))


def _signature(found: Any, name: str) -> str:
    """Return a signature, an argument in each line if it is long. A section shows no fields."""
    if inspect.isclass(found) and (issubclass(found, BaseModel) or issubclass(found, Exception)):
        return f"{name}(...)" if issubclass(found, Exception) else f"{name}(**values)"
    signature = inspect.signature(found)
    shown = [each for each in signature.parameters.values()
             if each.name not in ("self", "cls") and not each.name.startswith("_")]  # fmt: skip
    words = []
    keyword_only = False
    for each in shown:
        if each.kind is each.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            words.append("*")
        keyword_only = keyword_only or each.kind is each.VAR_POSITIONAL
        words.append(_argument(each))
    returned = signature.return_annotation
    nothing = returned is inspect.Signature.empty or inspect.isclass(found)
    end = "" if nothing else f" -> {_type(returned)}"
    line = f"{name}({', '.join(words)}){end}"
    return line if len(line) <= 88 else f"{name}(\n    {f',{chr(10)}    '.join(words)},\n){end}"


def _argument(each: inspect.Parameter) -> str:
    star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    text = star + each.name
    typed = each.annotation is not inspect.Parameter.empty
    if typed:
        text += f": {_type(each.annotation)}"
    if each.default is not inspect.Parameter.empty:
        value = repr(each.default)
        value = "..." if " at 0x" in value or value == "<factory>" else value
        text += f" = {value}" if typed else f"={value}"
    return text


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _docstring(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring: a list for each section, an example as code."""
    pattern = rf"^({'|'.join(_TITLES)}):(?: |$)"
    blocks = re.split(pattern, text, flags=re.M)
    yield from _paragraphs(blocks[0])
    for title, block in zip(blocks[1::2], blocks[2::2], strict=True):
        body = textwrap.dedent(block.strip("\n")) if block.startswith("\n") else block.strip()
        if title == "Example":
            yield f"**Example**\n\n```pycon\n{body.rstrip()}\n```"
        elif title in ("Args", "Attributes", "Raises"):
            entries = re.split(r"\n(?=\S)", body.strip())
            items = [_entry(each) for each in entries]
            yield f"**{title}**\n\n" + "\n".join(items)
        else:
            first, *others = list(_paragraphs(body))
            yield f"**{title}**: {first}"
            yield from others


def _entry(text: str) -> str:
    name, colon, meaning = " ".join(text.split()).partition(": ")
    return f"* `{name}`: {plain(meaning)}" if colon else f"* {plain(name)}"


def _paragraphs(text: str) -> Iterator[str]:
    for each in re.split(r"\n\s*\n", text.strip()):
        if each.strip():
            yield plain(" ".join(each.split()))
