"""The scaling benchmark's model recovers what it was fed, and its driver loop runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.benchmarks import BENCHMARKS, load

SCALING = BENCHMARKS / "scaling"

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def scaling():
    return load("benchmarks/scaling/scaling")


@pytest.mark.long
def test_the_pool_alone_delivers_all_in_bounded_memory():
    """A hundred thousand chunks as a stream; as a list they take many times more. Each in a process
    of its own: memory that tests before have freed would be taken for none."""

    def scheduled(stored: bool) -> dict[str, float]:
        code = (
            f"import sys, json; sys.path.insert(0, {str(SCALING)!r}); import scaling; "
            f"print(json.dumps(scaling.scheduling(100_000, 16, stored={stored})))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    found = scheduled(False)
    assert found["chunks"] == 100_000
    assert found["grew_mib"] < 6
    assert scheduled(True)["grew_mib"] > 12


@pytest.mark.long
def test_the_driver_with_ray_delivers_all_in_bounded_memory():
    """In a process of its own, for its memory is looked at."""
    code = "import json, scaling; print(json.dumps(scaling.driver(20_000, 2)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=SCALING, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["chunks"] == 20_000
    assert found["grew_mib"] < 100  # Ray itself takes about 50
