"""The product's sources and the tests' own as syntax trees, for rules about what code may say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("cluster", "dpdist", "tuning")


def product_files() -> list[Path]:
    """Return every Python file of the product."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    """Return a file's path from the root, with slashes."""
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """Return a file's syntax tree; nobody may change it."""
    return ast.parse(path.read_text())


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call with what is called, dotted: "os.replace", "written.write_text".

    Only the attribute is named where the rest is no plain name: of `(a / b).write_text()` it is
    "write_text".
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield _dotted(node.func), node


def _dotted(function: ast.expr) -> str:
    parts = []
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        parts.append(function.id)
    return ".".join(reversed(parts))


def last(dotted: str) -> str:
    """Return the last part of a dotted name: the method or function itself."""
    return dotted.rpartition(".")[2]


@cache
def functions_of(path: Path) -> frozenset[str]:
    """Return the names of a file's functions, those inside classes and functions too."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(node.name for node in ast.walk(tree_of(path)) if isinstance(node, kinds))


def marks_of(decorators: list[ast.expr]) -> set[str]:
    """Return the markers among decorators or listed values: "slow" of `pytest.mark.slow`."""
    found = set()
    for each in decorators:
        dotted = _dotted(each.func if isinstance(each, ast.Call) else each)
        if dotted.startswith("pytest.mark."):
            found.add(last(dotted))
    return found
