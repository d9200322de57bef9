"""The figures of the layout and of docstrings: limits that may only fall, and a way to fail."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from house_figures import (
    circles,
    definitions,
    docstrings,
    figures,
    imports_of,
    walk,
    without_docstring_rules,
    wording,
)

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {
    "files without package faces": 191,  # the last: a setting of torch that threads share
    "arrows": 1570,  # the last three: a paid sum in order, and jobs beside it in other threads
    "circles": 0,
    "files for one training step": 16,
    "files for a Cohen certificate": 12,
    "files for a search trial": 6,
    "files for an epsilon from recipe to report": 14,
    "files without rules for docstrings": 113,
    "'what' in 1,000 words of docstrings": 6.0,
    "docstrings that begin with Of": 9,
    "docstrings that begin with What": 26,
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


def test_words_of_docstrings_are_counted():
    text = '"""Of it."""\nclass A:\n    """What it is, whatever that is."""\n    def f(self): ...\n'
    texts = list(docstrings(ast.parse(text)))
    assert texts == ["Of it.", "What it is, whatever that is."]
    assert list(wording(texts).values()) == [250, 1, 1]
    assert list(wording([]).values()) == [0, 0, 0]


def test_files_without_rules_for_docstrings_are_those_that_pyproject_lists(tmp_path):
    lines = '"a/{b,c}.py" = ["D"]\n"a/d.py" = ["D102"]\n"e/*.py" = ["C901", "D"]\n'
    (tmp_path / "pyproject.toml").write_text(f"[tool.ruff.lint.per-file-ignores]\n{lines}")
    paths = ["a/b.py", "a/c.py", "a/d.py", "e/f.py", "g.py"]
    assert without_docstring_rules(tmp_path, paths) == ["a/b.py", "a/c.py", "e/f.py"]
