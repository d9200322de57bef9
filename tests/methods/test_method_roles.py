"""The roles of a method stay small."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest
from support.methods import every_method

from dpdist.methods.base import Capabilities, Execution, Method


def overridable(kind: type) -> list[str]:
    """Names that a subclass may define anew, inherited ones counted: functions, properties and
    attributes of the class (those that are only declared too) that are public, dpdist's own and not
    final. Options are no members."""
    found: dict[str, object] = {}
    for made in reversed(kind.__mro__):
        if made.__module__.startswith("dpdist."):
            found |= dict.fromkeys(vars(made).get("__annotations__", {})) | vars(made)
    options = {*getattr(kind, "model_fields", {})}
    options |= {each.name for each in fields(kind)} if is_dataclass(kind) else set()
    return sorted(
        name
        for name, member in found.items()
        if not name.startswith(("_", "model_"))
        and name not in options
        and not getattr(_function(member), "__final__", False)
    )


def _function(member: object) -> object:
    """Return the function behind a property or a class method."""
    return getattr(member, "fget", None) or getattr(member, "__func__", member)


def test_capabilities_are_one_frozen_value():
    assert Capabilities() == Method(name="plain").capabilities
    for method in every_method():
        assert type(method.capabilities) is Capabilities
        with pytest.raises(AttributeError):
            method.capabilities.takes_losses = True


def test_every_method_has_an_execution_of_itself():
    """Those that are named by a text are there, and are made for this class of options."""
    for method in every_method():
        execution = method.execution()
        assert isinstance(execution, Execution) and execution.method is method
        bases = [
            base
            for kind in type(execution).__mro__
            for base in vars(kind).get("__orig_bases__", ())
        ]
        made_for = [
            base.__args__[0] for base in bases if getattr(base, "__origin__", None) is Execution
        ]
        assert made_for and all(isinstance(method, kind) for kind in made_for)
        public = {name for name in vars(type(execution)) if not name.startswith("_")}
        own = public - set(overridable(Execution))
        assert own <= {"noise_location", "release_labels"}, "a hook that nobody calls"
