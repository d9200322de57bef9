"""`make lint` finds nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.whole

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("command", ["mypy", "ruff check .", "ruff format --check ."])
def test_nothing_is_found(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
