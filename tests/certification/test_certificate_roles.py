"""A kind of certificate is three small roles: interfaces are counted, so that none grows again."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, final

import pytest

import dpdist.certification
from dpdist.attacks import job as attacks
from dpdist.attacks import settings as evaluations
from dpdist.certification.certificate import Certificate, NoiseSampler
from dpdist.certification.cohen import Cohen, Smoothing
from dpdist.certification.evaluation import Evaluation
from dpdist.certification.expected_scores import ExpectedScores, ScoreTable
from dpdist.certification.registry import CERTIFICATES, KINDS, kind_of
from dpdist.certification.table import (
    CertificateTable,
    CohenTable,
    Description,
    TableFormat,
    VoteTable,
)
from dpdist.core.errors import UserError

MAX_ABSTRACT, MAX_OVERRIDABLE = 4, 12
# Abstract and overridable methods, inherited ones counted. They may only get fewer.
LIMITS: dict[type, tuple[int, int]] = {
    Certificate: (4, 9),
    Smoothing: (2, 9),
    Cohen: (0, 10),
    ExpectedScores: (0, 9),
    TableFormat: (4, 11),
    VoteTable: (2, 11),
    CohenTable: (0, 11),
    ScoreTable: (0, 11),
    Description: (1, 3),
    NoiseSampler: (0, 5),
    Evaluation: (4, 8),
}


def methods(of: type) -> dict[str, Any]:
    """Return the public methods and properties of a class and of its bases of this project."""
    found: dict[str, Any] = {}
    for parent in reversed(of.__mro__):
        if parent.__module__.split(".")[0] not in ("dpdist", __name__.split(".")[0]):
            continue
        for name, value in vars(parent).items():
            kinds = property | cached_property | classmethod | staticmethod
            if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds)):
                found[name] = value
    return found


def _function(method: Any) -> Any:
    """Return the function in a property, a class method or a method."""
    for name in ("fget", "func", "__func__"):
        method = getattr(method, name, None) or method
    return method


def overridable(of: type) -> set[str]:
    """Return the names of the methods that a subclass may replace."""
    every = methods(of).items()
    return {name for name, method in every if not getattr(_function(method), "__final__", False)}


def abstract(of: type) -> set[str]:
    """Return the names of the methods that a subclass must write."""
    names = set(getattr(of, "__abstractmethods__", ()))
    missing = {
        name
        for name, method in methods(of).items()
        if "NotImplementedError" in _function(method).__code__.co_names
    }
    return names | missing


def classes() -> Iterator[type]:
    """Yield the classes of the certification package, and of what is built on its evaluations."""
    folder = [str(Path(dpdist.certification.__file__).parent)]
    names = [f"dpdist.certification.{found.name}" for found in pkgutil.iter_modules(folder)]
    for module in (*map(importlib.import_module, names), attacks, evaluations):
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                yield value


BASES = sorted(
    {parent for of in classes() for parent in of.__mro__[1:] if parent in set(classes())},
    key=lambda of: of.__qualname__,
)


@pytest.mark.parametrize("of", BASES, ids=lambda of: of.__qualname__)
def test_no_base_class_asks_for_much(of: type) -> None:
    assert len(abstract(of)) <= MAX_ABSTRACT, abstract(of)
    assert len(overridable(of)) <= MAX_OVERRIDABLE, overridable(of)


@pytest.mark.parametrize("of", LIMITS, ids=lambda of: of.__qualname__)
def test_interfaces_do_not_grow(of: type) -> None:
    found = len(abstract(of)), len(overridable(of))
    assert found[0] <= LIMITS[of][0] and found[1] <= LIMITS[of][1], (found, overridable(of))


def test_the_base_classes_are_found() -> None:
    every = set(LIMITS) - {NoiseSampler}  # a protocol: nobody inherits from it
    assert every <= set(BASES)


def test_final_methods_are_not_replaced() -> None:
    for of in classes():
        for parent in of.__mro__[1:]:
            last = set(methods(parent)) - overridable(parent) if parent in BASES else set()
            assert not last & set(vars(of)), (of, parent)


def test_the_count_can_fail() -> None:
    class Large(ABC):
        @abstractmethod
        def must(self) -> None: ...

        @property
        @final
        def last(self) -> int:
            return 1

        @classmethod
        @final
        def made(cls) -> int:
            return 1

        @cached_property
        def kept(self) -> int:
            return 1

        @classmethod
        def said(cls) -> None:
            raise NotImplementedError

    class Larger(Large):
        def more(self) -> None: ...

    assert overridable(Larger) == {"must", "kept", "said", "more"}
    assert abstract(Larger) == {"must", "said"}


def test_every_kind_has_three_whole_roles() -> None:
    assert len({kind.settings for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        for role in (kind.settings, kind.table_class, type(kind.description)):
            assert not abstract(role), (role, abstract(role))
        assert kind.table_format.settings_class is kind.settings


def test_an_own_class_has_the_table_and_the_words_of_its_parent() -> None:
    class Own(ExpectedScores):
        pass

    assert kind_of(Own).settings is Own and kind_of(Own).table_class is ScoreTable
    assert kind_of(Own).table_format.settings_class is Own
    assert kind_of(Own).description is kind_of(ExpectedScores).description
    assert all(kind_of(of).settings is of for of in CERTIFICATES)

    class Alone(Certificate):
        def build_sampler(self, model: Any, input_shape: Any) -> Any: ...

        def sample(self, *given: Any) -> Any: ...

        def decide(self, partials: Any, sampler: Any) -> Any: ...

        def name_parts(self) -> Any: ...

    with pytest.raises(UserError, match=r"Alone: must be listed in .*registry\.KINDS"):
        kind_of(Alone)


def test_a_table_that_does_not_say_how_its_points_are_certified_is_not_attacked() -> None:
    class Own(CohenTable):
        recreate = TableFormat.recreate

    found = CertificateTable.__new__(CertificateTable)
    found.__dict__.update(path=Path("x"), mode="own")
    with pytest.raises(UserError, match="x: certificates of mode own cannot be attacked: Own has"):
        Own(Cohen).recreate(found, "l2", 10)


def test_the_page_on_extending_names_every_hook() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/extending.md").read_text()
    for of in (Certificate, TableFormat, Description):
        (line,) = (line for line in page.splitlines() if f" | `{of.__name__}` (" in line)
        *_, without, given, _ = line.split("|")
        assert set(re.findall(r"`(\w+)`", without)) == abstract(of)
        assert set(re.findall(r"`(\w+)`", given)) == overridable(of) - abstract(of)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(
            (name, "TableFormat")
            for name in ("row", "recompute_columns", "read_sizes", "recertify")
        ),
        *((name, "TableFormat") for name in ("check_table", "table_schema", "is_vote_based")),
        *((name, "Description") for name in ("describe", "summary_rows", "draws_phrase")),
    ],
)
def test_a_hook_of_earlier_versions_is_refused(name: str, place: str) -> None:
    """The parent's would be used in its place: an own radius, for instance, would be forgotten."""
    said = rf"Old\.{name}: is a part of the kind's {place} now"
    with pytest.raises(TypeError, match=said):
        type("Old", (Cohen,), {name: classmethod(lambda *_: None), "__module__": __name__})
    mixin = type("Old", (), {name: None})
    with pytest.raises(TypeError, match=said):
        type("Mixed", (mixin, Cohen), {"__module__": __name__})
    assert name not in methods(Certificate) and name not in methods(Cohen)
