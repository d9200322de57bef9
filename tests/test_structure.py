"""The house rules: imports run downward only, calculators stay light, nothing foreign slips in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What everybody may import: the errors, and the door through which files are read.
BASE = ("cluster.errors", "cluster.reading", "cluster.table_files", "cluster.yaml_files")

# package -> packages of ours it may import (itself always)
ALLOWED = {
    "base": set(),  # nothing of ours but itself
    "cluster": set(),
    "dpdist.errors": set(),
    "dpdist.fields": set(),
    "dpdist.bulk": {"dpdist.errors", "cluster"},
    "dpdist.privacy": {"dpdist.errors"},
    "dpdist.models": {"dpdist.errors", "dpdist.vision"},
    "dpdist.vision": set(),
    "dpdist.data": {"dpdist.errors", "dpdist.vision"},
    "dpdist.gradients": {"dpdist.errors", "dpdist.privacy"},
    "dpdist.methods": {
        "dpdist.errors",
        "dpdist.fields",
        "dpdist.privacy",
        "dpdist.gradients",
        "dpdist.models",
    },
    "dpdist.search_options": {"dpdist.fields"},
    "dpdist.recipe_sections": {"dpdist.fields", "dpdist.search_options"},
    "dpdist.recipe": {
        "dpdist.errors",
        "dpdist.fields",
        "dpdist.methods",
        "dpdist.recipe_sections",
    },
    "dpdist.runfolder": {
        "dpdist.errors",
        "dpdist.privacy",
        "dpdist.recipe",
        "dpdist.__init__",
        "cluster",
    },
    "dpdist.released": {"dpdist.errors", "dpdist.privacy", "dpdist.runfolder", "cluster"},
    "dpdist.exporting": {"dpdist.errors", "dpdist.runfolder", "cluster"},
    "dpdist.archive": {
        "dpdist.errors",
        "dpdist.fields",
        "dpdist.released",
        "dpdist.runfolder",
        "dpdist.exporting",
        "dpdist.privacy",
        "dpdist.__init__",
        "cluster",
    },
    "dpdist.certification": {
        "dpdist.bulk",
        "dpdist.errors",
        "dpdist.privacy",
        "dpdist.methods",
        "dpdist.models",
        "cluster",
    },
    "dpdist.attacks": {
        "dpdist.bulk",
        "dpdist.errors",
        "dpdist.models",
        "dpdist.certification",
        "cluster",
    },
    "dpdist.training": {
        "dpdist.archive",
        "dpdist.released",
        "dpdist.errors",
        "dpdist.recipe",
        "dpdist.recipe_sections",
        "dpdist.runfolder",
        "dpdist.privacy",
        "dpdist.gradients",
        "dpdist.methods",
        "dpdist.models",
        "dpdist.data",
        "cluster",
    },
    "tuning": {
        "dpdist.errors",
        "dpdist.recipe",
        "dpdist.recipe_sections",
        "dpdist.search_options",
        "dpdist.released",
        "dpdist.runfolder",
        "dpdist.privacy",
        "dpdist.gradients",
        "dpdist.methods",
        "dpdist.models",
        "dpdist.data",
        "dpdist.certification",
        "dpdist.training",
        "dpdist.__init__",
        "cluster",
    },
    "dpdist.reports": {
        "dpdist.attacks",
        "dpdist.certification",
        "dpdist.errors",
        "dpdist.recipe",
        "dpdist.released",
        "dpdist.runfolder",
        "dpdist.privacy",
        "dpdist.gradients",
        "dpdist.methods",
        "dpdist.__init__",
        "cluster",
    },
}
NO_TORCH_NO_RAY = (
    "dpdist.archive", "dpdist.bulk", "dpdist.privacy", "dpdist.recipe", "dpdist.released",
    "dpdist.reports",
    "dpdist.runfolder",
)  # fmt: skip


def _files():
    for package in ("cluster", "dpdist", "tuning"):
        yield from sorted((ROOT / package).rglob("*.py"))


def _unit(module: str) -> str | None:
    """The entry of ALLOWED (or foreign) that a module of ours belongs to."""
    if module in BASE:
        return "base"
    parts = module.split(".")
    if parts[0] == "cluster":
        return "cluster"
    if parts[0] == "dpdist":
        return ".".join(parts[:2]) if len(parts) > 1 else "dpdist.__init__"
    return "tuning" if parts[0] == "tuning" else None


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
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    unit = _unit(module)
    found = []
    for name in _imports(ast.parse(text)):
        target = _unit(name)
        if target == "dpdist.__version__":
            target = "dpdist.__init__"
        ours = target is not None and target not in (unit, "base")
        if ours and unit in ALLOWED and target not in ALLOWED[unit]:
            found.append(f"{module} imports {name}")
        if module.startswith(NO_TORCH_NO_RAY) and name.split(".")[0] in ("torch", "ray"):
            found.append(f"{module} imports {name}")
    return found


@pytest.mark.parametrize("path", list(_files()), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_run_downward(path):
    assert violations(path, path.read_text()) == []


def test_the_rule_can_fail():
    path = ROOT / "dpdist" / "privacy" / "plan.py"
    assert violations(path, "import torch")
    assert violations(path, "from dpdist.training import loop")
    assert violations(ROOT / "cluster" / "pool.py", "from dpdist import models")


@pytest.mark.parametrize(
    "module",
    [
        "dpdist.cli",
        "dpdist.recipe",
        "dpdist.privacy.plan",
        "dpdist.privacy.ledger",
        "dpdist.certification.reading",
        "dpdist.attacks.table",
    ],
)
def test_light_modules_import_neither_torch_nor_ray(module):
    code = f"import sys, {module}; print({{'torch', 'ray'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_wheel_would_contain_every_package_and_template():
    for path in _files():
        assert (path.parent / "__init__.py").exists(), f"{path.parent} has no __init__.py"


def test_test_files_have_names_of_their_own():
    """pytest imports test files by base name: two of one name cannot be collected together."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in set(names) if names.count(name) > 1] == []
