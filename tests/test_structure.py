"""The house rules: imports run downward only, calculators stay light, nothing foreign slips in."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpdist.privacy.phases import KINDS

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent

# The rooms from the ground up: room -> rooms it may import, besides itself and core.
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "cluster": set(),
    "data": set(),
    "models": set(),
    "privacy": set(),
    "randomness": {"models"},
    "certification": {"cluster", "models", "privacy", "randomness"},
    "gradients": {"randomness"},
    "attacks": {"cluster", "models", "randomness", "certification"},
    "config": {"privacy", "certification"},
    "methods": {"data", "models", "privacy", "randomness", "gradients", "attacks", "config"},
    "release": {"models", "privacy", "randomness", "certification", "config"},
    "runs": {"cluster", "privacy", "config", "methods", "release"},
    "serving": {"data", "certification", "release"},
    "training": {
        "cluster",
        "data",
        "models",
        "privacy",
        "randomness",
        "gradients",
        "config",
        "methods",
        "release",
        "runs",
    },
    "evaluation": {"data", "models", "randomness", "certification", "runs", "training"},
    "poisoning": {
        "cluster",
        "models",
        "privacy",
        "randomness",
        "certification",
        "runs",
        "training",
    },
    "tuning": {
        "cluster",
        "data",
        "models",
        "privacy",
        "randomness",
        "certification",
        "gradients",
        "config",
        "methods",
        "runs",
        "training",
    },
    "audits": {
        "cluster",
        "data",
        "models",
        "privacy",
        "randomness",
        "certification",
        "gradients",
        "attacks",
        "config",
        "methods",
        "runs",
        "training",
        "poisoning",
    },
    "reports": {"privacy", "randomness", "certification", "attacks", "config", "runs", "audits"},
    "pipeline": {"cluster", "certification", "runs", "training", "evaluation", "tuning", "reports"},
    "publishing": {"models", "privacy", "randomness", "release", "runs", "reports"},
    "importing": {"data", "models", "privacy", "methods", "runs"},
    "cli": {
        "cluster",
        "data",
        "models",
        "privacy",
        "randomness",
        "certification",
        "attacks",
        "release",
        "runs",
        "serving",
        "training",
        "evaluation",
        "poisoning",
        "tuning",
        "audits",
        "reports",
        "pipeline",
        "publishing",
        "importing",
    },
}
NO_TORCH_NO_RAY = ("dpdist.cluster.job_folder", "dpdist.privacy", "dpdist.reports", "dpdist.runs")


def _files():
    for package in ("cluster", "dpdist", "tuning"):
        yield from sorted((ROOT / package).rglob("*.py"))


def _module(path: Path) -> str:
    """The name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return name if parts[0] == "dpdist" else f"dpdist.{name}"


def _room(module: str) -> str | None:
    """None for what is foreign, and for dpdist/__init__.py."""
    parts = module.split(".")
    return parts[1] if parts[0] == "dpdist" and len(parts) > 1 and parts[1] in ROOMS else None


def _imports(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "dpdist":
                yield from (f"dpdist.{alias.name}" for alias in node.names)
            else:
                yield node.module


def violations(path: Path, text: str) -> list[str]:
    module = _module(path)
    room = _room(module)
    found = []
    for name in _imports(ast.parse(text)):
        target = _room(name)
        if room and target not in (None, room, "core") and target not in ROOMS[room]:
            found.append(f"{module} imports {name}")
        if module.startswith(NO_TORCH_NO_RAY) and name.split(".")[0] in ("torch", "ray"):
            found.append(f"{module} imports {name}")
        if name.split(".")[0] in ("cluster", "tuning"):
            found.append(f"{module} imports {name} by a second name")
    return found


def test_imports_run_downward():
    assert [line for path in _files() for line in violations(path, path.read_text())] == []


# --- no circles -------------------------------------------------------------------------------

MODULES = {_module(path): path for path in _files()}


def _needs(module: str, text: str) -> set[str]:
    """Modules of ours that it imports, inside functions too; what only annotations name is not."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in MODULES and name != module}


def circles(needs: dict[str, set[str]]) -> list[list[str]]:
    """Modules that need one another, by Tarjan's strongly connected components."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        open_.append(module)
        for other in sorted(needs[module]):
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in open_:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            start = open_.index(module)
            if len(open_) > start + 1:
                found.append(sorted(open_[start:]))
            del open_[start:]

    for module in needs:
        if module not in order:
            visit(module)
    return found


def test_no_modules_import_one_another():
    assert circles({name: _needs(name, path.read_text()) for name, path in MODULES.items()}) == []


def test_circles_are_found():
    late = "def f():\n    from dpdist.privacy import plan"
    assert _needs("dpdist.privacy.accounting", late) == {"dpdist.privacy", "dpdist.privacy.plan"}
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dpdist.privacy.plan"
    assert _needs("dpdist.privacy.phases", typed) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


# --- kinds speak for themselves ---------------------------------------------------------------


def asks_for(text: str, classes: set[str], names: set[str]) -> list[str]:
    """Where a source asks which kind something is: by isinstance or type, by a pattern of `match`,
    or by the name of the kind."""
    found = []
    for node in ast.walk(ast.parse(text)):
        asked: list[ast.AST] = []
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Name) and called.id in ("isinstance", "issubclass"):
            asked = [node.args[1]]
        elif isinstance(node, ast.Compare):
            asked = [node]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        for inner in (inner for part in asked for inner in ast.walk(part)):
            by_class = isinstance(inner, ast.Name | ast.Attribute)
            if by_class and ast.unparse(inner).split(".")[-1] in classes:
                found.append(ast.unparse(node))
            if isinstance(inner, ast.Constant) and inner.value in names:
                found.append(ast.unparse(node))
    return found


def test_nobody_asks_which_kind_a_phase_is():
    own = {ROOT / "dpdist" / "privacy" / "phases.py"}
    classes = {kind.__name__ for kind in KINDS.values()}
    for path in set(_files()) - own:
        assert asks_for(path.read_text(), classes, set(KINDS)) == [], path


def test_questions_about_kinds_are_found():
    for question in (
        "isinstance(phase, GaussianSteps | WorstOf)",
        "isinstance(phase, (int, plan.WorstOf))",
        "type(phase) is WorstOf",
        "record['kind'] == 'worst-of'",
        "kind in ('worst-of', 'votes')",
        "match phase:\n    case WorstOf():\n        pass",
        "match kind:\n    case 'worst-of':\n        pass",
    ):
        assert asks_for(question, {"GaussianSteps", "WorstOf"}, {"worst-of"}), question
    assert asks_for("WorstOf(choices) if wide else 'worst-of'", {"WorstOf"}, {"worst-of"}) == []


def test_the_rule_can_fail():
    path = ROOT / "dpdist" / "privacy" / "plan.py"
    assert violations(path, "import torch")
    assert violations(path, "from dpdist.training import worker")
    assert violations(ROOT / "cluster" / "actor_pool.py", "from dpdist import models")
    assert violations(ROOT / "tuning" / "search.py", "from cluster import actor_pool")


def test_no_circle_among_rooms():
    rooms = list(ROOMS)
    assert rooms[0] == "core" and not ROOMS["core"]
    for number, (room, below) in enumerate(ROOMS.items()):
        assert below <= set(rooms[:number]), room


LIGHT = (
    "dpdist.cli.main",
    "dpdist.runs.recipe",
    "dpdist.methods.registry",
    "dpdist.privacy.plan",
    "dpdist.privacy.ledger",
    "dpdist.certification.registry",
    "dpdist.certification.table_reader",
    "dpdist.release.bundle",
    "dpdist.audits.membership_findings",
    "dpdist.audits.registry",
    "dpdist.attacks.table",
    "dpdist.models",
    "dpdist.data",
    "dpdist.pipeline",
    "dpdist.training.pretraining",
    "dpdist.reports.html",
    "dpdist.publishing",
)


def test_light_modules_import_neither_torch_nor_ray():
    """One after the other in one process: the first that imports them is named."""
    lines = [
        f"import {name}; print('{name}', {{'torch', 'ray'}} & set(sys.modules))" for name in LIGHT
    ]
    code = "\n".join(["import sys", *lines])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.endswith(" set()")] == []


def test_wheel_would_contain_every_package_and_template():
    for path in _files():
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def _long(text: str) -> Iterator[tuple[str, int]]:
    """Functions of more than 50 lines, signature and docstring included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > 50:
                yield node.name, lines


def test_functions_stay_short():
    long = [(path.stem, *found) for path in _files() for found in _long(path.read_text())]
    assert len(long) < 10, long


def test_long_functions_are_found():
    text = "class A:\n    def f(self):\n" + "        x = 1\n"
    assert list(_long(text + "        x = 1\n" * 48)) == []
    assert list(_long(text + "        x = 1\n" * 49)) == [("f", 51)]


def test_test_files_have_names_of_their_own():
    """pytest imports test files by base name: two of one name cannot be collected together."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in set(names) if names.count(name) > 1] == []
