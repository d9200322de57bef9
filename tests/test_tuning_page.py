"""docs/how-to/tuning.md: the script for Ray Tune and ours run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpdist

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/how-to/tuning.md").read_text()
SCRIPTS = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```", PAGE, flags=re.M | re.S))


def run(folder: Path, name: str) -> str:
    for each in (name, "nets.py"):
        (folder / each).write_text(SCRIPTS[each])
    done = subprocess.run(
        [sys.executable, name], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_the_script_for_ray_tune_runs_as_printed(tmp_path):
    assert re.search(r"^\{'lr': .*, 'width': (8|16)\}$", run(tmp_path, "before.py"), flags=re.M)


@pytest.mark.nightly
def test_our_script_runs_as_printed(tmp_path):
    said = run(tmp_path, "after.py")
    assert re.search(r"^\{'lr': .*, 'width': (8|16)\}\n\((2\.99\d*|3), 0\.0001\)-DP", said, re.M), (
        said
    )
    best = dpdist.load_results(tmp_path / "runs" / "searched")
    assert 2.9 < best.guarantee.epsilon <= 3 and best.guarantee.kind == "proved"
    release = dpdist.load(tmp_path / "runs" / "searched" / "release")
    assert release.card["guarantee"]["epsilon"] == best.guarantee.epsilon
    assert release.card["extra"]["model"] in ("nets:narrow", "nets:wide")
