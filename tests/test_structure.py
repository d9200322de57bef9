"""The house rules: imports run downward only, calculators stay light, nothing foreign slips in."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpdist.privacy.phases import KINDS

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent


def _files():
    for package in ("cluster", "dpdist", "tuning"):
        yield from sorted((ROOT / package).rglob("*.py"))


# --- the direction of imports -----------------------------------------------------------------

LINT_IMPORTS = "import sys; from importlinter import cli; sys.exit(cli.lint_imports())"
PLANTED = {
    "dpdist/privacy/plan.py": "def late():\n    from dpdist.training import worker",
    "dpdist/data/record_hashes.py": "import dpdist",
    "dpdist/randomness/keys.py": "if False:\n    import dpdist.data.dataset",
    "dpdist/core/errors.py": "if TYPE_CHECKING:\n    from dpdist.core import fields",
    "dpdist/reports/facts.py": "import torch",
    "dpdist/stray.py": "",
}


def _lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run `lint-imports` on a checkout, with the contracts of its pyproject.toml."""
    return subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


def test_imports_keep_the_contracts():
    done = _lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_contracts_can_be_broken(tmp_path):
    for name in ("dpdist", "cluster", "tuning"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, text in PLANTED.items():
        with (tmp_path / name).open("a") as file:
            file.write(f"\n{text}\n")
    done = _lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    for line in (
        "Imports run downward BROKEN",
        "No files import one another BROKEN",
        "Nobody imports the public face BROKEN",
        "Accounting, run folders and reports know neither torch nor Ray BROKEN",
        "Who imports data BROKEN",
        "Who imports training BROKEN",
        "Who imports cluster KEPT",
    ):
        assert line in done.stdout
    for line in (
        "dpdist.stray",
        "dpdist.privacy.plan -> dpdist.training.worker",
        "dpdist.data.record_hashes -> dpdist ",
        "dpdist.randomness.keys -> dpdist.data.dataset",
        "dpdist.reports.facts -> torch",
    ):
        assert line in done.stdout, line


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


@pytest.mark.long
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
    """Functions of more than 50 lines, with the signature and without the docstring."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if lines > 50:
                yield node.name, lines


def test_functions_stay_short():
    long = [(path.stem, *found) for path in _files() for found in _long(path.read_text())]
    assert len(long) < 7, long


def test_long_functions_are_found():
    text = "class A:\n    def f(self):\n" + "        x = 1\n"
    assert list(_long(text + "        x = 1\n" * 48)) == []
    assert list(_long(text + "        x = 1\n" * 49)) == [("f", 51)]
    documented = text.replace("x = 1", '"""Do it.\n\n        Now.\n        """', 1)
    assert list(_long(documented + "        x = 1\n" * 49)) == []
    assert list(_long(documented + "        x = 1\n" * 50)) == [("f", 51)]


def test_test_files_have_names_of_their_own():
    """pytest imports test files by base name: two of one name cannot be collected together."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in set(names) if names.count(name) > 1] == []
