"""What a table says of fresh inputs: exact arithmetic, and worlds whose population is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from test_rebound import BOUNDARY, DRAWS, HISTOGRAMS, LABELS, counted, make

from dpdist.certification import table_reader
from dpdist.certification.statistics import population_bounds
from dpdist.certification.table_reader import recertify

ALPHA = 0.1


def stated(hits: np.ndarray, at: list[float], error: float, alpha: float = ALPHA) -> list:
    return population_bounds(table_reader.from_arrow(counted(hits, alpha)), at, error)


def test_the_bounds_are_clopper_pearsons_with_alpha_folded_in() -> None:
    # 60 inputs: 45 certified at 0.5 for certain, 15 whose label is never drawn.
    hits = np.array([DRAWS] * 45 + [0] * 15)
    first, second = stated(hits, [0.25, 0.5], 0.2)
    low = stats.beta.ppf(0.2 / 4, 45, 16)  # two radii, two sides
    high = stats.beta.ppf(1 - 0.2 / 4, 46, 15)
    for each in (first, second):
        assert each.accuracy_lower_bound == pytest.approx((low - ALPHA) / (1 - ALPHA), rel=1e-9)
        assert each.certifiable_upper_bound == pytest.approx(min(1, high / (1 - ALPHA)), rel=1e-9)
    (alone,) = stated(hits, [0.5], 0.2)
    # less is stated of one radius, and it is tighter
    assert alone.accuracy_lower_bound > first.accuracy_lower_bound
    assert (first.radius, second.radius) == (0.25, 0.5)


def test_a_known_population_is_covered() -> None:
    # Half of the population is robust for certain; the rest lies a hair below what 0.5 needs, where
    # certificates err as often as they may (8.6 %). Error 0.2: of 60 seeded repetitions 6 may
    # miss a side, more than 15 has probability 3e-4. Without alpha folded in, most miss.
    rng, robust = np.random.default_rng(7), 0.5
    missed, unfolded = 0, 0
    for _ in range(60):
        sure = rng.random(60) < robust
        hits = np.where(sure, DRAWS, rng.binomial(DRAWS, BOUNDARY - 1e-9, 60))
        (each,) = stated(hits, [0.5], 0.2)
        missed += each.accuracy_lower_bound > robust
        unfolded += each.accuracy_lower_bound * (1 - ALPHA) + ALPHA > robust
    assert missed <= 15
    assert unfolded > missed


def test_other_alphas_and_kinds() -> None:
    strict = recertify(make(HISTOGRAMS, LABELS), 0.05)
    (each,) = population_bounds(table_reader.from_arrow(strict), [0.0])
    assert each.accuracy_lower_bound == pytest.approx(
        (stats.beta.ppf(0.025, 2, 3) - 0.05) / 0.95, abs=1e-9
    )
    early = make(HISTOGRAMS, LABELS, mode="target-radius")  # keeps no counts of all classes
    (each,) = population_bounds(table_reader.from_arrow(early), [0.25])
    assert each.certifiable_upper_bound is None
