"""`make lint` finds nothing, and hooks and workflow run what it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", ["mypy", "ruff check .", "ruff format --check ."])
def test_nothing_is_found(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_the_scripts_of_benchmarks_use_what_there_is() -> None:
    """Names and arguments of ours; they are not typed strictly, and most run only with `long`."""
    scripts = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").glob("*.py"))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *map(str, scripts)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MYPYPATH": "benchmarks"},
    )  # fmt: skip
    assert "checked" in done.stdout, done.stdout + done.stderr
    wrong = [
        line
        for line in done.stdout.splitlines()
        if line.endswith(("[attr-defined]", "[call-arg]", "[name-defined]", "[import-not-found]"))
        and "does not explicitly export" not in line
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["torch", "ray.train", "transformers"])
@pytest.mark.parametrize("path", ["dpdist/privacy/plan.py", "dpdist/methods/new.py"])
def test_a_light_file_imports_nothing_heavy_at_module_level(path: str, name: str) -> None:
    """A file is light unless pyproject.toml lists it; inside functions all may be imported."""
    for text, code in ((f"import {name}\n", 1), (f"def late():\n    import {name}\n", 0)):
        done = subprocess.run(
            [
                sys.executable, "-m", "ruff", "check", "--select", "TID253",
                "--stdin-filename", path, "-",
            ],
            cwd=ROOT, capture_output=True, text=True, input=text,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert ("TID253" in done.stdout) == bool(code)


def test_a_commit_runs_what_make_lint_runs() -> None:
    rule = re.search(r"^lint: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.M)
    assert rule
    made = [line.split("/", 1)[1].split() for line in rule[1].splitlines()]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    entries = [hook["entry"].removeprefix(".venv/bin/").split() for hook in hooks]
    flags = {"--check", "--force-exclude", "."}  # a hook formats, and is given the files
    assert [[word for word in words if word not in flags] for words in made] == [
        [word for word in words if word not in flags] for words in entries
    ]


def test_the_workflow_runs_what_is_there() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["tests"]["steps"] if "run" in step]
    assert commands == [".ci/run"] and os.access(ROOT / ".ci" / "run", os.X_OK)
    targets = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), flags=re.M)
    made = re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert targets == ["test-all"] and set(targets) <= set(made)
