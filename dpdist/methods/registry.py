"""The registry of methods. A new one is a file in this folder, and its class's line in the table.

A user's own method needs no line: a recipe names it as package.module:Class, or by the name of an
entry point in the group dpdist.methods. Methods that only reproduce a paper are found like that, in
dpdist.papers, and are imported when a recipe names them.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import BeforeValidator, Discriminator, SerializeAsAny, Tag
from pydantic_core import PydanticCustomError

from dpdist.core.fields import validate_section
from dpdist.core.files import error_text, quoted
from dpdist.methods.base import Method
from dpdist.methods.dp_sgd import DPSGD, DPlis, InputNoiseMethod
from dpdist.methods.imported import Imported
from dpdist.methods.noisy_records import NoisyRecordsMethod
from dpdist.methods.pate import PATE
from dpdist.methods.private_prediction import PrivatePrediction

METHODS: tuple[type[Method], ...] = (
    DPSGD,
    DPlis,
    InputNoiseMethod,
    PrivatePrediction,
    NoisyRecordsMethod,
    PATE,
    Imported,
)

_USER_METHOD = "package.module:Class"
_GROUP = "dpdist.methods"
_TABLE = {method.model_fields["name"].default: method for method in METHODS}


def installed_methods() -> tuple[type[Method], ...]:
    """Return the methods of the table and of entry points, those of papers included."""
    names = sorted({each.name for each in entry_points(group=_GROUP)})
    return (*METHODS, *map(find_method, names))


def find_method(name: str) -> type[Method]:
    """Return the class of a method; one that is not in the table is imported only now.

    Args:
        name: in the table, of an entry point in the group dpdist.methods, or package.module:Class.

    Raises ValueError for an unknown name, or one that leads to no method.
    """
    if name in _TABLE:
        return _TABLE[name]
    location = name
    if ":" not in name:
        found = {each.name: each.value for each in entry_points(group=_GROUP)}
        if name not in found:
            known = [f"'{each}'" for each in sorted(_TABLE.keys() | found.keys())]
            expected = ", ".join([*known, f"or {_USER_METHOD}"])
            raise PydanticCustomError(
                "union_tag_invalid", "unknown", {"expected_tags": expected, "tag": name}
            )
        location = found[name]
    module, _, attribute = location.partition(":")
    try:
        method = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever a user's module does when it is imported
        raise ValueError(f"cannot import {quoted(location)}: {error_text(error)}") from error
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise ValueError(f"{quoted(location)} must be a class made from dpdist.methods.base.Method")
    return method


def _load_by_name(value: Any) -> Any:
    """Return a method outside the table, whose class is imported."""
    if isinstance(value, Method):
        return value
    return validate_section(find_method(value["name"]), value)


def _entry(value: Any) -> str | None:
    """Return the entry of the table for a method."""
    given = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if given is None or not isinstance(given, str):
        return None
    return given if given in _TABLE else _USER_METHOD


DEFAULT = DPSGD()

if TYPE_CHECKING:
    AnyMethod = Method
else:
    AnyMethod = Annotated[
        Union[  # its members are counted at run time
            *(Annotated[m, Tag(m.model_fields["name"].default)] for m in METHODS),
            Annotated[SerializeAsAny[Method], BeforeValidator(_load_by_name), Tag(_USER_METHOD)],
        ],
        Discriminator(_entry),
    ]
