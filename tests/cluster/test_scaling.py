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


def test_the_fit_recovers_planted_times(scaling):
    true = scaling.StepModel(2e-3, 1500.0, 4e-3, 26_010, 3e-4, 10e9 / 8)
    measured = {(w, b): true.step(w, b) for w in (1, 2, 4, 8) for b in (256.0, 512.0, 2048.0)}
    found = scaling.fit(measured, 2e-3, 26_010)
    for ours, planted in (
        (found.rate, true.rate),
        (found.fixed, true.fixed),
        (found.latency, true.latency),
    ):
        assert ours == pytest.approx(planted, rel=1e-4)
    slower = {key: 2 * seconds for key, seconds in measured.items()}
    assert scaling.fit(slower, 2e-3, 26_010).rate < 0.6 * true.rate


def test_the_ring_moves_twice_the_gradient(scaling):
    """2 (W-1)/W of the bytes, in 2 (W-1) hops (Patarasuk and Yuan, 2009)."""
    model = scaling.StepModel(0, 1, 0, 1000, 0.0, 8000.0)
    assert model.reduce(1) == 0
    assert model.reduce(2) == pytest.approx(1.0)
    assert model.reduce(1000) == pytest.approx(2 * 999 / 1000)
    assert scaling.StepModel(0, 1, 0, 0, 1.0, 1.0).reduce(5) == 8


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
