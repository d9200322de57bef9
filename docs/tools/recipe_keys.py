"""The keys of a recipe as Markdown: type, default, bounds and meaning, from the pydantic classes.

The meaning is the field's `description`, or the entry of the key under `Attributes:` or `Args:` in
the docstring of its class.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import AfterValidator, BaseModel, BeforeValidator, Discriminator, SerializeAsAny, Tag
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dpdist.certification.certificate import Certificate
from dpdist.certification.cohen import Smoothing
from dpdist.certification.registry import AnyCertificate
from dpdist.config.sections import AuditOptions
from dpdist.core import fields
from dpdist.core.fields import collect_conditions
from dpdist.methods.base import Method
from dpdist.methods.registry import installed_methods
from dpdist.runs.recipe import Recipe


@dataclass(frozen=True)
class Key:
    """A key of a recipe. kind: type and bounds, in words. only: when it applies, or ""."""

    name: str
    kind: str
    default: str
    meaning: str
    only: str = ""


# --- meanings ---------------------------------------------------------------------------------


def meaning(section: type[BaseModel], name: str) -> str:
    """Return what a key means; "" where neither its field nor a docstring says it."""
    field = section.model_fields[name]
    entries: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, BaseModel) and name in base.model_fields:
            entries |= documented(vars(base).get("__doc__") or "")
    text = entries.get(name) or _capital(field.description or "")
    text = re.sub(r"\bNone\b", "null", text)  # as a recipe writes it
    return plain(text if not text or text.endswith((".", ":")) else f"{text}.")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if re.match(r"[a-z]+ ", text) else text


def plain(text: str) -> str:
    """Return a docstring's text as Markdown: code stays, and nothing else is marked up."""
    parts = re.split(r"(`+[^`]+`+)", text)
    parts[::2] = [re.sub(r"([*<])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [f"`{part.strip('`')}`" for part in parts[1::2]]
    return "".join(parts)


def documented(docstring: str) -> dict[str, str]:
    """Return the entries under `Attributes:` and `Args:` of a docstring, by name.

    An entry may name several keys, separated by commas.
    """
    found: dict[str, str] = {}
    text = inspect.cleandoc(docstring) + "\n"
    for title, block in re.findall(r"^(Attributes|Args):\n((?:    .*\n|\n)*)", text, flags=re.M):
        for entry in re.split(r"\n(?=\S)", textwrap.dedent(block)):
            names, colon, entry_text = entry.partition(":")
            if colon and re.fullmatch(r"[\w, ]+", names):
                said = " ".join(entry_text.split())
                said = _capital(said) if title == "Args" else said
                found |= {name.strip(): said for name in names.split(",")}
    return found


# --- types and bounds -------------------------------------------------------------------------

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false",
          Path: "path", Any: "any value"}  # fmt: skip
_RULES = {
    fields._resolve_path: "",  # of a path, which its type says
    fields.check_hex_key: "64 lower-case hex digits",
    fields.check_run_name: "letters, digits, '.', '_' and '-', at most 100",
    fields._check_json: "JSON, at most 8 deep and 1,000 wide",
    fields._whole_above_one: "whole above 1",
    fields._check_one_line: "one line",
}


def kind(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Return a field's type and bounds in words. Raises LookupError for one without words."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(inner[0], (*inner[1:], *metadata))
    if origin in (Union, types.UnionType):
        several = [kind(each, metadata) for each in inner if each is not type(None)]
        words = " or ".join(dict.fromkeys(several))
        return f"{words}, or null" if type(None) in inner else words
    if annotation is type(None):
        return "null"
    words = _plain_kind(annotation, origin, inner)
    return ", ".join(filter(None, [words, *_bounds(metadata)]))


def _plain_kind(annotation: Any, origin: Any, inner: tuple[Any, ...]) -> str:
    if origin is Literal:
        return _either([f"`{_yaml(each)}`" for each in inner])
    if origin is tuple and inner[-1] is not ...:
        each, *others = dict.fromkeys(kind(one) for one in inner)
        assert not others, "a range has two ends of one kind"
        return f"[LOW, HIGH], each ({each})"
    if origin in (list, tuple):
        return f"list of ({kind(inner[0])})"
    if origin is dict:
        return f"mapping of ({kind(inner[0])}) to ({kind(inner[1])})"
    if annotation in _WORDS:
        return _WORDS[annotation]
    raise LookupError(f"no words for the type {annotation}")


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _bounds(metadata: tuple[Any, ...]) -> Iterator[str]:
    flat = [each for item in metadata
            for each in (item.metadata if isinstance(item, FieldInfo) else [item])]  # fmt: skip
    low, high, zero, others = _Bound(), _Bound(), False, []
    for each in flat:
        if isinstance(each, AfterValidator) and isinstance(each.func, fields.Range):
            low, high = low.tighten(each.func.low, max), high.tighten(each.func.high, min)
            zero = each.func.allow_zero
        elif isinstance(each, AfterValidator):
            if each.func not in _RULES:
                raise LookupError(f"no words for the rule {each.func}")
            others.append(_RULES[each.func])  # type: ignore[index]
        elif isinstance(each, annotated_types.Gt | annotated_types.Ge):
            strict = isinstance(each, annotated_types.Gt)
            low = low.tighten(each.gt if strict else each.ge, max, strict)
        elif isinstance(each, annotated_types.Lt | annotated_types.Le):
            strict = isinstance(each, annotated_types.Lt)
            high = high.tighten(each.lt if strict else each.le, min, strict)
        elif isinstance(each, annotated_types.MinLen):
            others.append(f"{each.min_length} or more")
        elif isinstance(each, annotated_types.MaxLen):
            others.append(f"at most {_n(each.max_length)} long")
        elif getattr(each, "pattern", None):
            others.append("letters, digits, '.', '_' and '-'")
        elif not isinstance(each, Tag | Discriminator | SerializeAsAny | BeforeValidator):
            raise LookupError(f"no words for {each!r}")
    yield "0 or " * zero + _between(low, high)
    yield from others


@dataclass(frozen=True)
class _Bound:
    """One end of a range. strict: the end itself is outside."""

    value: Any = None
    strict: bool = False

    def tighten(self, value: Any, pick: Callable[..., Any], strict: bool = False) -> _Bound:
        if self.value is None or pick(self.value, value) != self.value:
            return _Bound(value, strict)
        return self


def _between(low: _Bound, high: _Bound) -> str:
    if low.value is not None and high.value is not None and not (low.strict or high.strict):
        return f"{_n(low.value)} to {_n(high.value)}"
    words = []
    if low.value is not None:
        words.append(f"{'above' if low.strict else 'at least'} {_n(low.value)}")
    if high.value is not None:
        words.append(f"{'below' if high.strict else 'at most'} {_n(high.value)}")
    return ", ".join(words)


def _n(value: Any) -> str:
    if value == int(value) and abs(value) < 1e10 and (isinstance(value, int) or abs(value) < 1e6):
        return f"{int(value):,}"
    return re.sub(r"e([+-])0*", lambda sign: f"e{sign[1].strip('+')}", f"{value:g}")


def _yaml(value: Any) -> str:
    if isinstance(value, BaseModel):
        return json.dumps(value.model_dump(mode="json"))
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return "" if type(value) in _sections(field.annotation) else f"default `{_yaml(value)}`"
    return f"default `{_yaml(value)}`"


# --- keys -------------------------------------------------------------------------------------


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the sections that an annotation names, each kind of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [each for inner in get_args(annotation) for each in _sections(inner)]


def _is_tag(field: FieldInfo) -> bool:
    """Return whether a field has one value only, which names the kind of its section."""
    inner = get_args(field.annotation)
    return get_origin(field.annotation) is Literal and len(inner) == 1


def keys(
    section: type[BaseModel], prefix: str, told: dict[type[BaseModel], str], leave: tuple[str, ...]
) -> Iterator[Key]:
    """Yield the keys of a section and of the sections inside it.

    Args:
        section: the class.
        prefix: the section's own key and a dot; "" for the recipe.
        told: the sections that were told, and where; later ones refer there.
        leave: names of fields of `section` to leave out.
    """
    told.setdefault(section, prefix.removesuffix("."))
    only = {name: f"Only applies {each.description}." for each in collect_conditions(section)
            for name in each.keys}  # fmt: skip
    for name, field in section.model_fields.items():
        if name in leave or _is_tag(field):
            continue
        inside = _sections(field.annotation)
        text, condition = meaning(section, name), only.get(name, "")
        words = kind(field.annotation, tuple(field.metadata))
        before = [each for each in inside if each in told]
        if before:
            text += f" Its keys are those of `{told[before[0]]}`."
        yield Key(prefix + name, words, _default(field), text, condition)
        nested = "KEY." if get_origin(field.annotation) is dict else ""
        for each in inside:
            if each not in told:
                yield from keys(each, f"{prefix}{name}.{nested}", told, ())


def _write(found: list[Key], kind_of: str = "") -> str:
    """Return keys as a Markdown list.

    Args:
        found: the keys.
        kind_of: the kind of section that has them, if several kinds have keys of one name.
    """
    of = f" ({kind_of})" if kind_of else ""
    return "\n".join(
        f"* **`{key.name}`**{of}: {'; '.join(filter(None, [key.kind, key.default]))}. "
        + " ".join(filter(None, [key.meaning, key.only]))
        for key in found
    )


def _summary(section: type[BaseModel]) -> str:
    """Return the first paragraphs of a class's docstring, without its sections of entries."""
    text = inspect.cleandoc(section.__doc__ or "")
    text = re.split(r"^(?:Attributes|Args|Raises|Source|Example):", text, flags=re.M)[0]
    return plain(text.strip())


def recipe_page() -> str:
    """Return all keys but those of methods and certificates, a heading for each section."""
    told: dict[type[BaseModel], str] = {}
    apart = {"method": "methods.md", "certify": "certificates.md"}
    parts = [f"## `name`\n\n{_write(list(_own(Recipe, ('name',))))}"]
    for name, field in Recipe.model_fields.items():
        sections = _sections(field.annotation)
        if name == "name":
            continue
        head = f"## `{name}`\n\n"
        if name in apart:
            parts.append(f"{head}{meaning(Recipe, name)} Its keys: [{name}]({apart[name]}).")
        elif len(sections) == 1:
            text = _write(list(keys(sections[0], f"{name}.", told, ())))
            parts.append(f"{head}{_summary(sections[0])}\n\n{text}")
        else:
            parts.append(f"{head}{meaning(Recipe, name)}\n\n{_audits(sections, told)}")
    return "\n\n".join(parts)


def _own(section: type[BaseModel], names: tuple[str, ...]) -> Iterator[Key]:
    for name in names:
        field = section.model_fields[name]
        yield Key(name, kind(field.annotation, tuple(field.metadata)), _default(field),
                  meaning(section, name))  # fmt: skip


_NO_KEYS = "It has no keys but those above."


def _kinds(
    sections: list[type[BaseModel]],
    name: str,
    told: dict[type[BaseModel], str],
    bases: dict[type[BaseModel], str],
) -> str:
    """Return the keys of classes that kinds of a section share, then those of each kind.

    Args:
        sections: the kinds.
        name: the section's key.
        told: the sections that were told, and where.
        bases: heading of each class that several kinds are made from, the most general first.
    """
    shared: dict[str, Key] = {}
    parts = []
    tags = tuple({tag for each in sections for tag, field in each.model_fields.items()
                  if _is_tag(field)})  # fmt: skip
    for base, title in bases.items():
        own = [key for key in keys(base, f"{name}.", {}, tags) if key.name not in shared]
        shared |= {key.name: key for key in own}
        parts.append(f"### {title}\n\n{_write(own)}")
    for each in sections:
        said = [f"`{name}.{tag}: {_yaml(field.default)}`"
                for tag, field in each.model_fields.items() if _is_tag(field)]  # fmt: skip
        title = said[0] if name == "audit" else f"`{each.__name__}`"
        own = [key for key in keys(each, f"{name}.", dict(told), ()) if shared.get(key.name) != key]
        kind_of = title.strip("`").rpartition(" ")[2]
        parts.append(f"### {title}\n\n{_summary(each)}\n\n{_write(own, kind_of) or _NO_KEYS}")
    return "\n\n".join(parts)


def _audits(sections: list[type[BaseModel]], told: dict[type[BaseModel], str]) -> str:
    return _kinds(sections, "audit", told, {AuditOptions: "Every kind of `audit`"})


def methods_page() -> str:
    """Return the keys of every method."""
    told: dict[type[BaseModel], str] = {}
    for name, field in Recipe.model_fields.items():
        for each in _sections(field.annotation):
            if not issubclass(each, Method):
                list(keys(each, f"{name}.", told, ()))
    parts = []
    for each in installed_methods():
        name = each.model_fields["name"].default
        told_here = {known: at for known, at in told.items() if not issubclass(known, Method)}
        found = list(keys(each, "method.", told_here, ("name",)))
        text = _write(found, name) if found else "It has no keys but its name."
        parts.append(f"## `{name}`\n\n{_summary(each)}\n\n{text}")
    return "\n\n".join(parts)


def certificates_page() -> str:
    """Return the keys of every certificate."""
    bases: dict[type[BaseModel], str] = {
        Certificate: "Every certificate",
        Smoothing: "Every certificate with `sigma`",
    }
    text = _kinds(_sections(AnyCertificate), "certify", {}, bases)
    return re.sub(r"^###", "##", text, flags=re.M)


def all_keys() -> Iterator[tuple[type[BaseModel], str]]:
    """Yield every section of a recipe and each of its fields, once."""
    seen: set[type[BaseModel]] = set()
    todo: list[type[BaseModel]] = [Recipe, *installed_methods()]
    while todo:
        section = todo.pop(0)
        if section in seen:
            continue
        seen.add(section)
        for name, field in section.model_fields.items():
            if not _is_tag(field):
                yield section, name
            todo += _sections(field.annotation)
