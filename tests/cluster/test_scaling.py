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


def test_a_point_left_out_is_predicted_by_the_others(scaling):
    true = scaling.StepModel(2e-3, 1500.0, 4e-3, 26_010, 3e-4, 10e9 / 8)
    measured = {(w, b): true.step(w, b) for w in (1, 2) for b in (128.0, 512.0, 1024.0)}
    models, worst = scaling.leave_one_out(measured, 2e-3, 26_010)
    assert len(models) == 6 and worst < 1e-4
    measured[2, 512.0] *= 1.5  # a disturbed measurement shows
    assert scaling.leave_one_out(measured, 2e-3, 26_010)[1] > 0.2


def test_efficiency_falls_with_workers_and_rises_with_the_batch(scaling):
    model = scaling.StepModel(2e-3, 1500.0, 1e-3, 26_010, 1e-4, 10e9 / 8)
    counts = [2**k for k in range(10)]
    falling = [model.efficiency(w, 1024) for w in counts]
    assert falling[0] == 1 and falling == sorted(falling, reverse=True)
    assert model.efficiency(64, 16_384) > model.efficiency(64, 512)
    limit = model.pays_until(1024)
    assert model.efficiency(limit, 1024) >= 0.5 > model.efficiency(2 * limit, 1024)


def test_the_ring_moves_twice_the_gradient(scaling):
    """2 (W-1)/W of the bytes, in 2 (W-1) hops (Patarasuk and Yuan, 2009)."""
    model = scaling.StepModel(0, 1, 0, 1000, 0.0, 8000.0)
    assert model.reduce(1) == 0
    assert model.reduce(2) == pytest.approx(1.0)
    assert model.reduce(1000) == pytest.approx(2 * 999 / 1000)
    assert scaling.StepModel(0, 1, 0, 0, 1.0, 1.0).reduce(5) == 8


def test_a_faster_link_pays_for_more_workers(scaling):
    def model(gbit):
        return scaling.Assumed(50_000, gbit, 20e-6, 11_000_000, 4e-3).model(2e-3)

    slow, fast = model(10), model(400)
    assert slow.reduce(2) == pytest.approx(2 * 20e-6 + 8 * 11e6 * 8 / 10e9)
    assert fast.pays_until(60_000) > slow.pays_until(60_000)


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


def test_short_chunks_share_calls_and_long_ones_do_not(scaling):
    short = scaling.scheduling(20_000, 4)
    assert short["chunks"] == 20_000 and short["calls"] < 20_000 / 40
    long = scaling.scheduling(2_000, 4, pace=0.2)
    assert long["chunks"] == long["calls"] == 2_000


@pytest.mark.long
def test_the_driver_with_ray_delivers_all_in_bounded_memory():
    """In a process of its own, for its memory is looked at."""
    code = "import json, scaling; print(json.dumps(scaling.driver(20_000, 2)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=SCALING, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["chunks"] == 20_000
    assert found["grew_mib"] < 100  # Ray itself takes about 50


def test_a_step_on_paper_is_the_sum_of_its_parts(scaling, capsys, tmp_path):
    constants = scaling.Constants(
        sampling=8e-3, digest=1e-8, noise=3e-8, ledger=1e-3, fixed=4e-3, rate=900.0,
        ray_start=10.0, load=(0.1, 0.2),
    )  # fmt: skip
    assumed = scaling.Assumed(rate=1000.0, gbit=8.0, hop=1e-4, parameters=1_000_000, fixed=0.0)
    scaling.paper(assumed, constants, batch=640, steps=100)
    said = capsys.readouterr().out
    assert "nothing here ran on a GPU" in said and "MEASURED" in said and "ASSUMED" in said
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| ")]
    found = {row[0]: [float(cell.rstrip("%").replace(",", "")) for cell in row[1:]]
             for row in rows if row[0].isdigit()}  # fmt: skip
    assert len(found) == 3
    for *parts, step, _, seconds in found.values():
        assert sum(parts) - parts[2] == pytest.approx(step, abs=0.06)  # MiB sent is no time
        assert seconds == pytest.approx(10 + 100 * step / 1e3, abs=0.6)
    # By hand: 640 / (64 * 1000) s; 126 hops, and 63/64 of twice 8 MB at 1 GB/s.
    sampling, passes, sent, reduction, release, rest = found["64"][:6]
    assert (sampling, passes, release, rest) == (0.12, 10.0, 40.0, 5.0)
    assert sent == 15 and reduction == pytest.approx(1e3 * (126e-4 + 63 / 64 * 16e-3), abs=0.01)
    assert found["8"][4] == 40.0
    # Kept constants are read, and not measured again.
    path = tmp_path / "constants.json"
    path.write_text(json.dumps(scaling.asdict(constants)))
    assert scaling.Constants.of(path, quick=True) == constants
