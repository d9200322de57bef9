"""The recipes that search a noise split: what they vary, and that every candidate costs the same.

What a candidate costs is computed here from its own numbers: losses of one step on a grid, composed
by Fourier transform.
"""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
from scipy import stats

from dpdist.core.errors import UserError
from dpdist.runs.recipe import Recipe, find_recipe, load_recipe
from dpdist.tuning.preview import sizes_without_data
from dpdist.tuning.search import check_certifiable
from dpdist.tuning.space import SearchCost, apply_values, check_space, one_step_cost

# How many candidates share the budget out in a way of their own, or have a batch of their own.
COSTS = {
    "stobatch": 1, "certificate": 1, "secure-sgd": 5, "functional": 12, "pate": 5, "dplis": 3,
}  # fmt: skip
NAMES = tuple(COSTS)
ROBUST = ("stobatch", "certificate")  # splits of noise that certifies, of which no privacy depends
EPSILONS = np.arange(0, 4, 0.1)
CELL, CELLS = 2e-4, 1 << 18  # of the grid of losses, around 0


def searched(name: str, **changes) -> Recipe:
    return load_recipe(find_recipe(f"digits-{name}-search"), changes)


def cost_of(recipe: Recipe) -> SearchCost:
    return SearchCost(recipe, sizes_without_data(recipe, None, "r"), recipe.tune.num_trials, "r")


def candidates(recipe: Recipe) -> list[Recipe]:
    """Every combination of listed values."""
    space = recipe.tune.space
    listed = itertools.product(*(domain.choice for domain in space.values()))
    return [apply_values(recipe, dict(zip(space, each, strict=True)), "r") for each in listed]


def splits_of_their_own(recipe: Recipe) -> list[Recipe]:
    """One candidate for each batch size and each way to share the budget."""
    found = {}
    for each in candidates(recipe):
        found[each.training.batch_size, one_step_cost(each.method)] = each
    return list(found.values())


# --- the oracle


@cache
def step_transforms(rate: float, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Fourier transforms of one step's privacy loss, when a record goes and when it comes."""
    edges = np.linspace(-12 * noise, 1 + 12 * noise, 400_001)
    middle = (edges[:-1] + edges[1:]) / 2
    without = np.diff(stats.norm.cdf(edges, 0, noise))
    record = (1 - rate) * without + rate * np.diff(stats.norm.cdf(edges, 1, noise))
    loss = np.log1p(rate * np.expm1((2 * middle - 1) / (2 * noise**2)))
    found = []
    for mass, signed in ((record, loss), (without, -loss)):
        low = np.floor(signed / CELL).astype(int)
        upper = signed / CELL - low  # split between two cells: the mean loss is kept
        grid = np.bincount(low % CELLS, mass * (1 - upper), CELLS)
        grid += np.bincount((low + 1) % CELLS, mass * upper, CELLS)
        found.append(np.fft.rfft(grid))
    return found[0], found[1]


def deltas(recipe: Recipe, noise: float, records: int) -> np.ndarray:
    """Compute delta of one training at EPSILONS, for both directions, from the recipe's fields."""
    releases: list[tuple[float, float, int]] = []  # rate, noise multiplier, how often
    method, training = recipe.method, recipe.training
    if method.name in ("pate", "functional"):
        releases.append((1.0, noise, 1))  # splits of one Gaussian
    else:
        rate = training.batch_size / records
        steps = training.steps or math.floor(training.epochs * records / training.batch_size)
        releases.append((rate, noise, steps))
    shares = getattr(method, "redistribution", None)
    if shares is not None:
        releases.append((shares.sample_rate, shares.noise_multiplier, 1))
    losses = (np.arange(CELLS) + CELLS // 2) % CELLS - CELLS // 2
    found = []
    for side in (0, 1):
        product = np.ones(CELLS // 2 + 1, complex)
        for rate, multiplier, often in releases:
            product = product * step_transforms(rate, multiplier)[side] ** often
        mass = np.clip(np.fft.irfft(product, CELLS), 0, None)
        excess = 1 - np.exp(np.minimum(EPSILONS[:, None] - losses * CELL, 0))
        found.append(excess @ mass)
    return np.array(found)


def test_the_oracle_knows_the_gaussian_mechanism():
    noise, exact = 2.0, []
    for epsilon in EPSILONS:
        shift = 1 / (2 * noise)
        first = stats.norm.cdf(shift - epsilon * noise)
        exact.append(first - math.exp(epsilon) * stats.norm.cdf(-shift - epsilon * noise))
    pate = searched("pate")
    assert np.abs(deltas(pate, noise, 1000) - exact).max() < 1e-6
    assert np.abs(deltas(pate, 1.05 * noise, 1000) - exact).max() > 1e-3


# --- the recipes


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_search_over_a_split_costs_what_its_recipe_says(name, coarse_grid):
    recipe = searched(name)
    check_space(recipe, "r")
    cost = cost_of(recipe)
    target = recipe.privacy.epsilon
    assert 0.99 * target <= cost.guarantee.epsilon <= target
    head = find_recipe(recipe.name).read_text().splitlines()[0]
    assert f"epsilon {target:g} in all" in head
    assert cost.varies_cost == (name not in ROBUST)
    assert len(splits_of_their_own(recipe)) == COSTS[name]


DEAR = ("functional", "secure-sgd", "pate", "dplis")  # seconds each


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in DEAR)) for name in NAMES]
)
def test_all_candidates_cost_the_same(name, coarse_grid):
    """None more than the recipe's own setting (or than the floor that is paid for), at any epsilon
    and in both directions; and with a twentieth less noise each would."""
    recipe = searched(name)
    cost = cost_of(recipe)
    records = cost.record_counts.training_records(1.0)
    own = deltas(recipe, cost.noise_multiplier, records)
    floor = 1e-3 * recipe.privacy.delta / recipe.tune.num_trials.mean_trials
    ceiling = np.maximum(own, floor) if cost.varies_cost else own
    for trial in splits_of_their_own(recipe):
        noise = cost.trial_noise_multiplier(trial)
        assert (deltas(trial, noise, records) <= ceiling * (1 + 2e-3) + 1e-12).all(), trial.method
        less = deltas(trial, 0.95 * noise, records)
        assert (less > ceiling * (1 + 2e-3)).any(), trial.method


@pytest.mark.parametrize("name", ROBUST)
def test_a_split_of_the_noise_that_certifies_keeps_its_sum(name):
    recipe = searched(name)
    hidden = []
    for trial in candidates(recipe):
        method = trial.method
        behind = method.hidden_noise_std if name == "stobatch" else method.sigma
        total = math.hypot(trial.certify.sigma, behind / method.sensitivity)
        assert total == pytest.approx(0.25, abs=1e-4)
        if name == "stobatch":
            assert trial.certify.sigma == pytest.approx(method.input_noise_std, abs=1e-4)
        hidden.append(behind)
    assert len(set(hidden)) == len(candidates(recipe)) >= 5


def test_noise_in_the_model_certifies_beyond_the_input_s(recipe):
    """A radius that the input's noise alone does not reach is no reason to refuse."""
    searching = searched("stobatch")
    score = searching.tune.score.model_copy(
        update={"objectives": {"certified-accuracy": 1.0}, "radius": 0.3, "radius_cap": None}
    )
    for trial in candidates(searching):
        check_certifiable(trial, score, "r")
    with pytest.raises(UserError, match="radius"):
        check_certifiable(recipe(certify={"sigma": 0.1118}), score, "r")
