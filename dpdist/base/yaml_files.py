"""YAML as people write it by hand, read strictly: one file, one meaning.

Refused, with the line: a key given twice (the last one would win silently), numbers that YAML 1.1
reads to the base 8 or 60 (0100 would be 64, 1:30 would be 90), aliases that contain themselves or
grow beyond reason, explicit tags, endless nesting, and control characters.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from dpdist.base.errors import UserError
from dpdist.base.reading import read_text, reason, shown

MOST_BYTES = 128 * 2**10
_DEPTH = 50
_DIGITS = 100
_NODES = 20_000  # with every alias written out
_OCTAL = re.compile(r"[-+]?0[0-7_]+")


def read_yaml(path: str | Path, *, other_bases: bool = False) -> list[Any]:
    """The documents of a YAML file, as plain dicts, lists, strings, numbers, booleans and None.

    other_bases: read 010 and 1:30 as YAML does, as 8 and 90, which nobody else does; cluster files
    hold modes so.

    Raises dpdist.base.reading.NoSuchFile when there is none, UserError for what is refused above,
    for more than 128 KiB and for what is no YAML.
    """
    return parse_yaml(read_text(path, MOST_BYTES), str(path), other_bases=other_bases)


def parse_yaml(text: str, where: str, *, other_bases: bool = False) -> list[Any]:
    """`read_yaml` of text that came otherwise; `where` begins the complaints."""
    loader = None
    try:
        loader = _Loader(text, other_bases)
        documents = []
        while loader.check_data():
            documents.append(loader.get_data())
        return documents
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 5,000 digits
        raise UserError(f"{where}: cannot be read as YAML: {reason(error)}") from None
    finally:
        if loader is not None:
            loader.dispose()


class _Loader(yaml.SafeLoader):
    """SafeLoader, without dates (they stay text), that refuses what the module says."""

    def __init__(self, text: str, other_bases: bool) -> None:
        super().__init__(text)
        self._other_bases = other_bases
        self._open = 0
        self._size: dict[int, int] = {}  # of each finished node, aliases written out
        self._height: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        alias = isinstance(event, yaml.AliasEvent)
        line = event.start_mark.line + 1
        if not alias and event.tag is not None and event.tag != "!":
            raise UserError(f"line {line}: a tag ({shown(event.tag)}); write the plain value")
        self._open += 1
        if self._open > _DEPTH:
            raise UserError(f"line {line}: nested more than {_DEPTH} deep")
        node = super().compose_node(parent, index)
        self._open -= 1
        if alias:
            if id(node) not in self._size:
                raise UserError(f"line {line}: an alias of what it lies in (*{event.anchor})")
        else:
            self._measure(node)
        if self._size[id(node)] > _NODES or self._open + self._height[id(node)] > _DEPTH:
            raise UserError(
                f"line {line}: more than {_NODES:,} values or {_DEPTH} levels, aliases written out"
            )
        return node

    def _measure(self, node: Any) -> None:
        inner: list[Any] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
            self._check_keys(node)
        else:
            self._check_scalar(node)
        self._size[id(node)] = 1 + sum(self._size[id(part)] for part in inner)
        self._height[id(node)] = 1 + max((self._height[id(part)] for part in inner), default=0)

    def _check_keys(self, node: yaml.MappingNode) -> None:
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UserError(f"line {line}: a key must be a word or a number")
            name = key.value if key.tag.endswith(":merge") else self.construct_object(key)
            if name in seen:
                raise UserError(
                    f"{shown(key.value)} is given twice, on lines {seen[name]} and {line}: keep one"
                )
            seen[name] = line

    def _check_scalar(self, node: yaml.ScalarNode) -> None:
        line, text = node.start_mark.line + 1, node.value
        number = node.tag.endswith((":int", ":float"))
        if number and len(text) > _DIGITS:
            raise UserError(f"line {line}: a number of {len(text):,} characters")
        if any("\ud800" <= letter <= "\udfff" or letter == "\0" for letter in text):
            raise UserError(f"line {line}: {shown(text)} is no text")
        octal = number and node.tag.endswith(":int") and _OCTAL.fullmatch(text)
        if not self._other_bases and (octal or (number and ":" in text)):
            raise UserError(
                f"line {line}: {text} must be a decimal number, YAML reads it to the base "
                f'{8 if octal else 60}: write {self.construct_object(node)}, or "{text}" for the '
                "text"
            )


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
