"""README.md: its scripts run as they are printed, and its commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "README.md").read_text()


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_its_quickstarts_run_and_print_what_they_show(tmp_path):
    """In an empty folder, by a process of its own."""
    train, certify = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S)
    (tmp_path / "quickstart.py").write_text(train + certify)
    done = subprocess.run(
        [sys.executable, "quickstart.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    guarantee, certified = done.stdout.splitlines()
    assert f"```text\n{guarantee}\n```" in PAGE
    assert re.fullmatch(r"certified accuracy at radius 0\.25: \d\d%", certified)
    assert (tmp_path / "certified.png").stat().st_size > 1000


def test_its_make_targets_exist():
    made = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = set(re.findall(r"`make ([\w-]+)`", PAGE))
    assert named and named <= made
