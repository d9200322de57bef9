"""The mechanism itself: what the best of K trials gives away, measured and computed exactly.

The base mechanism is a noisy count: N(0, 1) on one data set, N(1, 1) on its neighbour, times the
noise; its value is its score. The best of K has the exact distribution function G(F(t)), with G
the generating function of K's law, so that its privacy loss is known without any theorem.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from scipy import integrate, stats

from dpdist.config.search import LawRecipe, TuneRecipe
from dpdist.core.binomial import clopper_pearson_lower, clopper_pearson_upper
from dpdist.gradients.noise import add_noise
from dpdist.privacy.calibration import search_guarantee
from dpdist.privacy.phases import GaussianReleases, NoisyVotes, WorstOf
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key
from dpdist.tuning.manifest import best_trial, draw_number_of_trials, draw_trials

pytestmark = [pytest.mark.slow, pytest.mark.guarantee]

DELTA = 1e-3
NOISE = 2.0  # multiplier: standard deviation of the noise on a count


def generating_function(law: LawRecipe, order: int = 0):
    """G(z) = E[z^K], or its derivative, in closed form."""
    if law.name == "poisson":
        mean = law.mean
        return lambda z: mean**order * np.exp(mean * (z - 1))
    if law.name == "fixed":
        return (lambda z: z**law.runs) if not order else (lambda z: law.runs * z ** (law.runs - 1))
    selection = law.secret_law
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


def true_delta(law: LawRecipe, epsilon: float) -> float:
    """The exact delta of the best of K at epsilon: the larger hockey-stick divergence."""
    slope = generating_function(law, 1)

    def density(t, centre):
        return slope(stats.norm.cdf(t, centre, NOISE)) * stats.norm.pdf(t, centre, NOISE)

    def excess(t, a, b):
        return max(0.0, density(t, a) - math.exp(epsilon) * density(t, b))

    # "No model" has the same probability on both sides and adds nothing for epsilon >= 0.
    return max(
        integrate.quad(excess, -20, 40, args=pair, limit=400, epsabs=1e-12)[0]
        for pair in ((0.0, 1.0), (1.0, 0.0))
    )


LAWS = [
    LawRecipe(name="logarithmic", mean=6.0),
    LawRecipe(name="geometric", mean=6.0),
    LawRecipe(name="negative-binomial", shape=-0.5, mean=6.0),
    LawRecipe(name="poisson", mean=6.0),
]


def stated(law: LawRecipe) -> float:
    phases = (GaussianReleases(NOISE, 1),)
    if law.name == "fixed":
        plan = PrivacyPlan(100, (GaussianReleases(NOISE, law.runs),), DELTA)
        return plan.guarantee().epsilon
    selection = law.secret_law
    return search_guarantee(phases, selection, records=100, delta=DELTA).epsilon


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_the_stated_epsilon_covers_the_exact_loss(law):
    """By the exact distribution: delta at the stated epsilon is within the promise; and the search
    does cost more than one run, whose epsilon would not cover it."""
    epsilon = stated(law)
    assert true_delta(law, epsilon) <= DELTA
    one = PrivacyPlan(100, (GaussianReleases(NOISE, 1),), DELTA).guarantee().epsilon
    assert epsilon > one


def test_a_fixed_number_without_composition_is_caught():
    """Best of 30 accounted as one run: its exact delta is beyond the promise; composed, it is not.
    A secret random number of the same mean accounted as one run is caught as well."""
    one = PrivacyPlan(100, (GaussianReleases(NOISE, 1),), DELTA).guarantee().epsilon
    fixed = LawRecipe(name="fixed", runs=30)
    assert true_delta(fixed, one) > 10 * DELTA
    assert true_delta(fixed, stated(fixed)) <= DELTA
    assert true_delta(LawRecipe(name="geometric", mean=30.0), one) > 2 * DELTA


def search_many(law: LawRecipe, centre: float, searches: int, seed: int) -> np.ndarray:
    """The released score of each search (-inf: no model), by the code that runs real searches."""
    tune = TuneRecipe.model_validate(
        {"space": {"x": {"uniform": (0, 1)}}, "law": law.model_dump(exclude_none=True)}
    )
    released = np.full(searches, -np.inf)
    for number in range(searches):
        key = derive_key(bytes(32), "test", seed, number)
        trials = draw_trials(tune, key)
        scores = {
            trial.number: float(add_noise(np.array([centre]), trial.key, NOISE)[0])
            for trial in trials
        }
        winner = best_trial(trials, scores)
        if winner is not None:
            released[number] = scores[winner]
    return released


def measured_epsilon(law: LawRecipe, searches: int, search=search_many) -> float:
    """A lower bound on epsilon at DELTA from searches on two neighbours, wrong with probability at
    most 0.001: the threshold comes from the exact law, counts from disjoint keys."""
    low, high = (search(law, centre, searches, seed) for centre, seed in ((0, 1), (1, 2)))
    threshold = stats.norm.ppf(0.995 ** (1 / max(1.0, law.mean or law.runs)), 0, NOISE)
    hits = clopper_pearson_lower(int((high > threshold).sum()), searches, 0.0005)
    false = clopper_pearson_upper(int((low > threshold).sum()), searches, 0.0005)
    return math.log(max(float(hits) - DELTA, 1e-12) / float(false))


@pytest.mark.long
def test_measured_distinguishability_stays_within_the_stated_epsilon():
    """4,000 searches on each of two neighbours, drawn and decided by the real code. The bound is
    wrong with probability at most 0.001; the same measurement exceeds what a search accounted at
    no cost (epsilon 0) would allow, so it can fail."""
    law = LawRecipe(name="geometric", mean=6.0)
    found = measured_epsilon(law, 4000)
    assert 0 < found <= stated(law)


SPLITS = [0.1, 0.5]  # parts of mu^2 = 1 / NOISE^2 that the first of two releases has
Parts = list[tuple[float, float]]  # of each release: what a neighbour moves, and its noise


def counts(split: float) -> Parts:
    """Two noisy counts."""
    return [(1.0, NOISE / part**0.5) for part in (split, 1 - split)]


def votes(split: float) -> Parts:
    """A teacher that moves the most votes on five inputs, and all votes on three of them."""
    phase = NoisyVotes(NOISE, 5, 3, split, 1, 1.0)
    return [(5**0.5, phase.screen_noise), (6**0.5, phase.vote_noise)]


def split_many(
    parts: Callable[[float], Parts], law: LawRecipe, centre: float, searches: int, seed: int
) -> np.ndarray:
    """As `search_many`, of trials that split one budget differently: their score is the mean of
    what they release, weighted by precision. Splits are drawn by the code of real searches."""
    space = {"method.split": {"choice": SPLITS}}
    tune = TuneRecipe.model_validate({"space": space, "law": law.model_dump(exclude_none=True)})
    released = np.full(searches, -np.inf)
    for number in range(searches):
        trials = draw_trials(tune, derive_key(bytes(32), "split", seed, number))
        scores = {}
        for trial in trials:
            noisy = [
                moved * add_noise(np.array([centre * moved]), derive_key(trial.key, k), std)[0]
                / (std / NOISE) ** 2
                for k, (moved, std) in enumerate(parts(trial.values["method.split"]))
            ]  # fmt: skip
            scores[trial.number] = float(sum(noisy))
        winner = best_trial(trials, scores)
        if winner is not None:
            released[number] = scores[winner]
    return released


PRICES = {
    counts: [tuple(GaussianReleases(NOISE / p**0.5, 1) for p in (s, 1 - s)) for s in SPLITS],
    votes: [(NoisyVotes(NOISE, 5, 3, s, 1, 1.0),) for s in SPLITS],
}


@pytest.mark.long
@pytest.mark.parametrize("parts", [counts, pytest.param(votes, marks=pytest.mark.long)])
def test_a_search_over_splits_stays_within_its_epsilon(parts):
    """2,000 searches on each of two neighbours, against what such a search is priced; the bound is
    wrong with probability at most 0.001. Priced without the first of its releases, as if a split
    were free, the search's exact delta is beyond the promise."""
    law = LawRecipe(name="geometric", mean=6.0)
    choices = WorstOf(tuple(PRICES[parts]))
    priced = search_guarantee((choices,), law.secret_law, records=100, delta=DELTA)
    assert priced.epsilon == pytest.approx(stated(law), rel=5e-3)  # each split has the same profile
    assert 0 < measured_epsilon(law, 2000, partial(split_many, parts)) <= priced.epsilon
    without = search_guarantee(PRICES[counts][1][1:], law.secret_law, records=100, delta=DELTA)
    assert true_delta(law, without.epsilon) > 2 * DELTA


@pytest.mark.long
def test_released_scores_follow_the_exact_law():
    """Kolmogorov-Smirnov on 4,000 searches against G(F(t)); fails by chance once in 10^4 seeds.
    A law with another mean is rejected by the same test."""
    law = LawRecipe(name="geometric", mean=4.0)
    scores = search_many(law, 0.0, 4000, 3)

    def distribution(mean: float):
        g = generating_function(law.model_copy(update={"mean": mean}))
        return lambda t: g(stats.norm.cdf(t, 0, NOISE))

    assert stats.kstest(scores, distribution(4.0)).pvalue > 1e-4
    assert stats.kstest(scores, distribution(5.0)).pvalue < 1e-6


@pytest.mark.parametrize("law", [*LAWS[:2], LAWS[3]], ids=lambda law: law.name)
def test_the_number_of_trials_follows_its_law(law):
    """Chi-square on 1,500 draws of K; fails by chance once in 10^4 seeds per law."""
    draws = [draw_number_of_trials(law, derive_key(bytes(32), "k", i)) for i in range(1500)]
    selection = law.secret_law
    ks = range(0, 12)
    expected = [math.exp(selection.log_pmf(k)) * len(draws) for k in ks]
    expected.append(selection.tail_probability(12) * len(draws))
    observed = [draws.count(k) for k in ks] + [sum(k >= 12 for k in draws)]
    pairs = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 4]
    rest = [(o, e) for o, e in zip(observed, expected, strict=True) if e <= 4]
    pairs.append((sum(o for o, _ in rest), sum(e for _, e in rest) or 1e-9))
    statistic = sum((o - e) ** 2 / e for o, e in pairs if e > 1e-6)
    assert stats.chi2.sf(statistic, len(pairs) - 1) > 1e-4
