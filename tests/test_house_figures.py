"""The figures of the layout: limits that may only fall, and that the counting can fail."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from house_figures import circles, definitions, figures, imports_of, walk

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {
    "files without package faces": 172,
    "arrows": 1292,
    "circles": 4,
    "files for one training step": 16,
    "files for a Cohen certificate": 12,
    "files for a search trial": 6,
    "files for an epsilon from recipe to report": 14,
}


def test_no_figure_is_above_its_limit():
    found = figures(ROOT)
    assert {name: found[name] for name, limit in LIMITS.items() if found[name] > limit} == {}
    assert 200 <= found["median of their lines"] <= 350


def test_imports_are_found_wherever_they_are():
    text = "from a import b\ndef f():\n    import a.c\nif TYPE_CHECKING:\n    from a.d import E\n"
    assert imports_of(ast.parse(text), {"a", "a.b", "a.c", "a.d"}) == {"a.b", "a.c", "a.d"}


def test_circles_are_found():
    needs = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}
    assert circles(needs) == [["a", "b", "c"], ["e", "f"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_a_walk_counts_each_file_once():
    assert list(definitions(ast.parse("def f(): ...\nclass A:\n    def g(self): ..."))) == [
        "f", "A", "A.g",
    ]  # fmt: skip
    where = {"f": ["x"], "A.g": ["x"], "h": ["y"], "twice": ["x", "y"]}
    assert walk(["f", "h", "A.g"], where) == ["x", "y"]
    for name in ("twice", "nowhere"):
        with pytest.raises(LookupError, match=name):
            walk([name], where)
