"""`make check` runs what carries a guarantee, says what it leaves out, and is no clock."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import hypothesis_settings, selection, sources

TESTS = Path(__file__).resolve().parent
FILES = [
    path
    for path in TESTS.rglob("test_*.py")
    if not path.name.endswith(hypothesis_settings.DEVICE_TEST_SUFFIX)
]
FILE = """import pytest

pytestmark = [pytest.mark.timeout(9), pytest.mark.{mark}]


@pytest.mark.slow
@pytest.mark.parametrize("x", [1, 2])
def test_one(x): ...


@pytest.mark.whole
def test_two(): ...


@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_three(x): ...


def helper(): ...
"""


@pytest.mark.parametrize(("mark", "run"), [("guarantee", 1), ("whole", 0)])
def test_tests_are_counted_by_their_markers(tmp_path, mark, run):
    path = tmp_path / "test_some.py"
    path.write_text(FILE.format(mark=mark))
    assert selection.markers_of(path) == {"timeout", mark}
    assert selection.is_left_out(path) == (mark == "whole")
    assert selection.count(path) == (run, 3)


def test_a_summary_names_the_guarantees_that_are_run_and_those_that_are_not(tmp_path):
    sources = {"some": "guarantee", "plain": "timeout", "lost": "guarantee, pytest.mark.whole"}
    for name, mark in sources.items():
        (tmp_path / f"test_{name}.py").write_text(FILE.format(mark=mark))
    told = selection.report(tmp_path.iterdir())
    assert told[0].startswith("2 of 3 test files, 2 of 9 test functions; left out is what is ")
    assert told[1:] == [
        "of a guarantee: 1 of 2 files, 1 of 6 test functions: some (1 of 3)",
        "of a guarantee, wholly left out: lost",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "accounting", "audit_bounds", "best_of", "bounds", "budget", "calibrate", "engine",
        "expected_score_bounds", "job", "ledger", "loop", "norms", "one_step", "radii", "scores",
        "sequential", "stopping_scores", "tighter_bounds", "two_class",
    ],
)  # fmt: skip
def test_what_carries_a_guarantee_is_run(name):
    (path,) = [path for path in FILES if path.name == f"test_{name}.py"]
    assert selection.GUARANTEE in selection.markers_of(path)
    assert selection.count(path)[0] > 0


class Item:
    """A collected test, as far as its selection asks."""

    def __init__(self, nodeid: str, *marks: str) -> None:
        self.nodeid, self.marks = nodeid, [getattr(pytest.mark, name).mark for name in marks]

    def get_closest_marker(self, name: str) -> object:
        return next((mark for mark in self.marks if mark.name == name), None)

    def iter_markers(self) -> list:
        return self.marks


@pytest.mark.parametrize(
    ("args", "night", "run"), [(["t"], False, 3), (["t"], True, 4), (["n.py::a"], False, 4)]
)
def test_nightly_tests_wait_and_dear_files_go_first(pytestconfig, monkeypatch, args, night, run):
    """In a checkout where no file was ever timed."""
    monkeypatch.setattr(selection, "IS_NIGHT", night)
    items = [Item("a.py::a"), Item("n.py::a", "nightly", "long"), Item("b.py::a", "whole"),
             Item("c.py::a", "long")]  # fmt: skip
    config = SimpleNamespace(
        option=SimpleNamespace(check=False), args=args, hook=SimpleNamespace(
            pytest_deselected=lambda items: None
        ),
    )  # fmt: skip
    conftest = pytestconfig.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    conftest.pytest_collection_modifyitems(config, items)
    assert len(items) == run
    assert [item.nodeid[0] for item in items if item.nodeid[0] != "n"] == ["c", "b", "a"]
    assert "DPDIST_NIGHTLY=1 $(TESTS) -m nightly" in (TESTS.parent / "Makefile").read_text()


@pytest.mark.long
def test_what_is_run_starts_no_other_process():
    """In the test function itself; a helper that starts one is not seen."""
    found = []
    for path in FILES:
        for node in [] if selection.is_left_out(path) else ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                left = sources.marks_of(node.decorator_list) & selection.LEFT_OUT
                called = [dotted for dotted, _ in sources.calls(node)]
                starts = any(name.startswith(("subprocess.", "ray.init")) for name in called)
                if starts and not left:
                    found.append(f"{path.name}::{node.name}")
    assert found == []


@pytest.mark.long
def test_a_slow_test_is_named_and_does_not_fail(tmp_path):
    (tmp_path / "least.py").write_text("import conftest\nconftest.MOST = 0.05\n")
    (tmp_path / "test_it.py").write_text(
        "import time\n\n\ndef test_it():\n    began = time.process_time()\n"
        "    while time.process_time() < began + 0.1:\n        pass\n"
    )
    plugins = ["-p", "conftest", "-p", "least", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--check", "--rootdir", ".", *plugins, "test_it.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{tmp_path}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 warning" in done.stdout
    assert "0.1 s of processor time: mark it `slow`" in done.stdout
    assert "what --check runs" in done.stdout
