from __future__ import annotations

import numpy as np
import pytest

from dpdist.certification import sequential
from dpdist.certification.sequential import TargetTest, compute_thresholds, planned_looks

ALPHA = 0.01


def test_looks_are_geometric_multiples_and_end_at_the_cap() -> None:
    looks = planned_looks(100_000, 500)
    assert looks[0] == 500 and looks[-1] == 100_000
    assert all(look % 500 == 0 for look in looks) and 20 <= len(looks) <= 26
    assert planned_looks(130, 500) == (130,)
    assert planned_looks(1130, 100)[-1] == 1130


def error_by_walking(test: sequential.Thresholds, p: float) -> float:
    """Probability of ever rejecting at p, by a walk over single draws: another algorithm."""
    alive, rejected, at = np.ones(1), 0.0, 0
    for look, needed in zip(test.looks, test.critical_counts, strict=True):
        while at < look:
            alive = np.append(alive * (1 - p), 0.0) + np.append(0.0, alive * p)
            at += 1
        rejected += alive[needed:].sum()
        alive[needed:] = 0.0
    return float(rejected)


@pytest.mark.parametrize("p0", [0.5, 0.97725])
def test_error_at_p0_is_exactly_what_is_stated(p0: float) -> None:
    test = compute_thresholds(p0, ALPHA, planned_looks(2000, 50))
    assert error_by_walking(test, p0) == pytest.approx(test.error, rel=1e-9)
    assert test.error <= ALPHA
    # It is not conservative either, but for the grain of the counts.
    assert test.error > (0.9 if p0 < 0.9 else 0.5) * ALPHA
    assert error_by_walking(test, p0 * 0.99) < test.error
    assert error_by_walking(test, p0 + 0.3 * (1 - p0)) > test.error


def test_spending_follows_the_square_root() -> None:
    looks = planned_looks(5000, 100)
    test = compute_thresholds(0.9, ALPHA, looks)
    for i, look in enumerate(looks):
        cut = sequential.Thresholds(0.9, ALPHA, looks[: i + 1], test.critical_counts[: i + 1], 0.0)
        assert error_by_walking(cut, 0.9) <= ALPHA * np.sqrt(look / 5000) * (1 + 1e-9)


def test_a_failed_radius_ends_the_sequence() -> None:
    looks = (100, 200)
    test = TargetTest((0.6, 0.7), ALPHA, looks)
    # A later, larger radius alone must not count.
    test._rejected[1] = True
    assert test.passed() == 0


def test_futility_stops_early_and_adds_nothing() -> None:
    looks = planned_looks(100_000, 500)
    hopeless, undecided = (TargetTest((0.97725,), 0.001, looks) for _ in range(2))
    assert hopeless.update(0, 400) and hopeless.passed() == 0
    assert not undecided.update(0, 492)


def mixture_error(p: float, p0: float, alpha: float, cap: int) -> float:
    """Exact probability at p that the confidence sequence ever excludes p0 within cap draws."""
    alive, rejected = np.ones(1), 0.0
    for n in range(1, cap + 1):
        alive = np.append(alive * (1 - p), 0.0) + np.append(0.0, alive * p)
        out = sequential.beta_mixture_rejects(np.arange(n + 1), n, p0, alpha)
        rejected += alive[out].sum()
        alive[out] = 0.0
    return float(rejected)


@pytest.mark.parametrize("p0", [0.5, 0.97725])
def test_anytime_error_is_exact_and_below_alpha(p0: float) -> None:
    error = mixture_error(p0, p0, ALPHA, 600)
    assert 0.1 * ALPHA < error <= ALPHA
    # Rejecting at 1 / (2 alpha), as has been done elsewhere, is a test at 2 alpha.
    assert mixture_error(p0, p0, 2 * ALPHA, 600) > error
