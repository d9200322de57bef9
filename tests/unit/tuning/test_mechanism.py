"""The mechanism itself: what the best of K trials gives away, measured and computed exactly.

The base mechanism is a noisy count: N(0, 1) on one data set, N(1, 1) on its neighbor, times the
noise; its value is its score. The best of K has the exact distribution function G(F(t)), with G
the generating function of K's distribution, so that its privacy loss is known without any theorem.
"""

from __future__ import annotations

import math
import stat

import numpy as np
import pytest
from scipy import integrate, stats
from support.mechanisms import log_pmf

from dpdist.config.search import NumTrialsRecipe
from dpdist.privacy.calibration import search_guarantee
from dpdist.privacy.phases import GaussianReleases
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key
from dpdist.runs.folder import RunFolder
from dpdist.tuning.manifest import (
    SearchFolder,
    Trial,
    best_trial,
    draw_number_of_trials,
    draw_trials,
    ensure_manifest,
    read_trials,
)

DELTA = 1e-3
NOISE = 2.0  # multiplier: standard deviation of the noise on a count


def generating_function(distribution: NumTrialsRecipe, order: int = 0):
    """G(z) = E[z^K], or its derivative, in closed form."""
    if distribution.name == "poisson":
        mean = distribution.mean
        return lambda z: mean**order * np.exp(mean * (z - 1))
    if distribution.name == "fixed":
        runs = distribution.runs
        return lambda z: runs**order * z ** (runs - order)
    selection = distribution.secret_distribution
    gamma, eta = selection.gamma, selection.shape
    if eta == 0:
        scale = -math.log(gamma)
        if not order:
            return lambda z: -np.log(1 - (1 - gamma) * z) / scale
        return lambda z: (1 - gamma) / (1 - (1 - gamma) * z) / scale
    norm = gamma**-eta - 1
    if not order:
        return lambda z: ((1 - (1 - gamma) * z) ** -eta - 1) / norm
    return lambda z: eta * (1 - gamma) * (1 - (1 - gamma) * z) ** (-eta - 1) / norm


def true_delta(distribution: NumTrialsRecipe, epsilon: float) -> float:
    """The exact delta of the best of K at epsilon: the larger hockey-stick divergence."""
    slope = generating_function(distribution, 1)

    def density(t, center):
        return slope(stats.norm.cdf(t, center, NOISE)) * stats.norm.pdf(t, center, NOISE)

    def excess(t, a, b):
        return max(0.0, density(t, a) - math.exp(epsilon) * density(t, b))

    # "No model" has the same probability on both sides and adds nothing for epsilon >= 0.
    return max(
        integrate.quad(excess, -20, 40, args=pair, limit=400, epsabs=1e-12)[0]
        for pair in ((0.0, 1.0), (1.0, 0.0))
    )


LAWS = [
    NumTrialsRecipe(name="logarithmic", mean=6.0),
    NumTrialsRecipe(name="geometric", mean=6.0),
    NumTrialsRecipe(name="negative-binomial", shape=-0.5, mean=6.0),
    NumTrialsRecipe(name="poisson", mean=6.0),
]


def stated(distribution: NumTrialsRecipe) -> float:
    phases = (GaussianReleases(NOISE, 1),)
    if distribution.name == "fixed":
        plan = PrivacyPlan(100, (GaussianReleases(NOISE, distribution.runs),), DELTA)
        return plan.guarantee().epsilon
    selection = distribution.secret_distribution
    return search_guarantee(phases, selection, records=100, delta=DELTA).epsilon


@pytest.mark.parametrize("distribution", LAWS, ids=lambda distribution: distribution.name)
def test_the_stated_epsilon_covers_the_exact_loss(distribution):
    """By the exact distribution: delta at the stated epsilon is within the promise; and the search
    does cost more than one run, whose epsilon would not cover it."""
    epsilon = stated(distribution)
    assert true_delta(distribution, epsilon) <= DELTA
    one = PrivacyPlan(100, (GaussianReleases(NOISE, 1),), DELTA).guarantee().epsilon
    assert epsilon > one


def test_a_fixed_number_without_composition_is_caught():
    """Best of 30 accounted as one run: its exact delta is beyond the promise; composed, it is not.
    A secret random number of the same mean accounted as one run is caught as well."""
    one = PrivacyPlan(100, (GaussianReleases(NOISE, 1),), DELTA).guarantee().epsilon
    fixed = NumTrialsRecipe(name="fixed", runs=30)
    assert true_delta(fixed, one) > 10 * DELTA
    assert true_delta(fixed, stated(fixed)) <= DELTA
    assert true_delta(NumTrialsRecipe(name="geometric", mean=30.0), one) > 2 * DELTA


@pytest.mark.parametrize("distribution", [LAWS[0], LAWS[3]], ids=lambda law: law.name)
def test_the_number_of_trials_follows_its_law(distribution):
    """Chi-square on 1,500 draws of K; fails by chance once in 10^4 seeds per distribution."""
    keys = (derive_key(bytes(32), "k", i) for i in range(1500))
    draws = np.array([draw_number_of_trials(distribution, key) for key in keys])
    selection = distribution.secret_distribution
    expected = [math.exp(log_pmf(selection, k)) * len(draws) for k in range(12)]
    expected = np.array([*expected, selection.tail_probability(12) * len(draws)])
    observed = np.bincount(draws.clip(max=12), minlength=13)
    rare = expected <= 4  # put together
    pairs = [*zip(observed[~rare], expected[~rare], strict=True)]
    pairs.append((observed[rare].sum(), expected[rare].sum() or 1e-9))
    statistic = sum((o - e) ** 2 / e for o, e in pairs if e > 1e-6)
    assert stats.chi2.sf(statistic, len(pairs) - 1) > 1e-4


KEY = bytes(range(32))


def test_everything_is_drawn_before_and_read_back_never_redrawn(recipe, tmp_path):
    tune = recipe(tune={"num_trials": {"name": "poisson", "mean": 8.0}}).tune
    folder = SearchFolder(RunFolder(tmp_path))
    ensure_manifest(folder, tune, KEY)
    before = folder.manifest.read_bytes()
    trials = read_trials(folder)
    assert trials == draw_trials(tune, KEY)
    assert len({trial.key for trial in trials}) == len(trials) > 1
    assert all(0.1 <= trial.values["training.learning_rate"] <= 1 for trial in trials)
    ensure_manifest(folder, tune, bytes(32))  # another key would draw others
    assert folder.manifest.read_bytes() == before
    assert draw_trials(tune, bytes(32)) != trials
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_keys_and_values_do_not_depend_on_how_many_trials_there_are(recipe):
    def drawn(runs: int, **more: str) -> list[Trial]:
        num_trials = {"name": "fixed", "runs": runs, "mean": None}
        return draw_trials(recipe(tune={"num_trials": num_trials, **more}).tune, KEY)

    assert drawn(9)[:2] == drawn(2)
    assert [trial.values for trial in drawn(3, searcher="optuna")] == [None] * 3


def test_the_best_is_the_highest_score_and_ties_ignore_the_data():
    trials = [Trial(n, KEY, tie) for n, tie in enumerate(("b", "c", "a"))]
    assert best_trial(trials, {0: 0.1, 1: 0.3, 2: 0.2}) == 1
    assert best_trial(trials, {0: 0.2, 2: 0.2}) == 0
    assert best_trial(trials, {2: 0.2, 0: 0.2, 1: 0.2}) == 1
    assert best_trial(trials, {2: -5.0}) == 2  # the others failed: minus infinity
    assert best_trial(trials, {}) is None
    assert best_trial([], {}) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"name": "poisson", "mean": 2}, "no trial, and no model, with probability 0.14"),  # e^-2
        ({"name": "geometric", "mean": 4}, "at least 2 with probability 0.75"),
        ({"name": "fixed", "runs": 3}, "fixed, 3 trials"),
    ],
)
def test_a_random_number_of_trials_says_what_to_expect(given, expected):
    assert expected in NumTrialsRecipe(**given).full_description
