"""What runs on the simulated device (`support/device.py`), in a process of its own.

Torch counts its devices once, at the first backward pass of a process: a device that is added later
has no queue there, and one that is added earlier changes all other tests' process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import hypothesis_settings

TESTS = Path(__file__).resolve().parents[1]


def test_all_that_runs_on_a_device() -> None:
    files = sorted(
        str(path) for path in TESTS.rglob(f"test_*{hypothesis_settings.DEVICE_TEST_SUFFIX}")
    )
    assert len(files) >= 2
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    chosen = [] if os.environ.get("DPDIST_NIGHTLY") else ["-m", "not slow"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *files],
        cwd=TESTS.parent, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
