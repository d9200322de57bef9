"""The seam: nobody outside a method's own class asks which method it is. Read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.methods import every_method

from dpdist.methods.base import Execution, Method
from dpdist.methods.registry import METHODS

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Path("dpdist/methods/registry.py")
FILES = [
    path.relative_to(ROOT)
    for package in ("cluster", "dpdist", "tuning")
    for path in sorted((ROOT / package).rglob("*.py"))
]

KINDS = [*METHODS, *(type(method.execution()) for method in every_method())]
CLASSES = {
    made.__name__
    for kind in KINDS
    for made in kind.__mro__
    if {Method, Execution} & set(made.__mro__[1:])
}
MODULES = {path.stem for path in FILES if path.parent == CATALOGUE.parent}
NAMES = {method.model_fields["name"].default for method in METHODS}
# Options that a method has beside what everybody may ask for.
OPTIONS = {name for method in METHODS for name in method.model_fields} - set(dir(Method)) - {"name"}


def own(path: Path) -> bool:
    """Whether a file may know of one method: those of the methods themselves."""
    return path.parent == CATALOGUE.parent and path not in (
        CATALOGUE, CATALOGUE.with_name("base.py"),
    )  # fmt: skip


def last_name(node: ast.expr) -> str:
    """c of a.b.c; of what is no chain of names, nothing."""
    return getattr(node, "attr", getattr(node, "id", ""))


def of_a_method(node: ast.expr) -> bool:
    """method, self.method, recipe.method ..."""
    return last_name(node) == "method"


def branches(text: str) -> Iterator[str]:
    """Where a source asks which method it has."""
    for node in ast.walk(ast.parse(text)):
        where = f"line {getattr(node, 'lineno', 0)}: "
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpdist.methods"):
            yield from (where + a.name for a in node.names if a.name in CLASSES)
        elif isinstance(node, ast.Attribute):
            owner = last_name(node.value)
            option = of_a_method(node.value) and node.attr in OPTIONS
            if option or (owner in MODULES and node.attr in CLASSES):
                yield where + ast.unparse(node)
        elif isinstance(node, ast.Compare | ast.MatchValue):
            if {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)} & NAMES:
                yield where + ast.unparse(node)
        elif isinstance(node, ast.Call) and last_name(node.func) in ("getattr", "hasattr"):
            yield from [where + ast.unparse(node)] * of_a_method(node.args[0])


@pytest.mark.long
@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=str)
def test_nobody_asks_which_method_it_is(folder):
    found = [
        f"{path}, {line}"
        for path in FILES
        if path.parent == folder and not own(path)
        for line in branches((ROOT / path).read_text())
        # the catalogue lists the classes, and asks nothing
        if not (path == CATALOGUE and line.split(": ")[1] in CLASSES)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "from dpdist.methods.dp_sgd import DPlis",
        "from dpdist.methods.dpal_training import DPALExecution",
        "if isinstance(m, hidden_noise.HiddenNoiseMethod): pass",
        'recipe.method.name == "secure-sgd"',
        'method.name in ("pixeldp", "hgm-pixeldp")',
        'recipe.method.variant != "full"',
        "self.recipe.method.redistribution",
        'getattr(recipe.method, "redistribution", None)',
        "match name:\n    case 'dplis':\n        pass",
    ],
)
def test_a_branch_would_be_found(text):
    assert list(branches(text))


def test_every_method_file_is_of_one_system():
    """A method's own file knows itself, and what it is made from."""
    for path in filter(own, FILES):
        tree = ast.parse((ROOT / path).read_text())
        made = {n.name for n in tree.body if isinstance(n, ast.ClassDef)} & CLASSES
        known = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        } & CLASSES
        bases = {
            name.id  # those of Execution[Method] too
            for node in tree.body
            if isinstance(node, ast.ClassDef)
            for base in node.bases
            for name in ast.walk(base)
            if isinstance(name, ast.Name)
        }
        if made:
            assert known <= bases, f"{path} knows of {known - bases}"
