"""A search with a fixed number of trials: the price of all of them, and what is told meanwhile."""

from __future__ import annotations

import json
import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.stats import norm
from searches import finish

from dpdist import pipeline
from dpdist.cluster.executor import open_executor
from dpdist.core import console
from dpdist.core.files import write_json
from dpdist.privacy.ledger import Ledger
from dpdist.reports.results import load_results
from dpdist.tuning.manifest import SearchFolder, read_trials
from dpdist.tuning.trial import prepare_trial, train_until

FULL_BATCH = {
    "data": {"name": "digits"},
    "training": {"batch_size": 1439, "steps": 4, "learning_rate": 0.5},
}


def full_batch_epsilon(steps: int, noise: float, delta: float) -> float:
    """Closed form for `steps` Gaussian releases of all records (Balle and Wang 2018)."""
    mu = math.sqrt(steps) / noise

    def excess(epsilon: float) -> float:
        left = norm.cdf(mu / 2 - epsilon / mu)
        return left - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return float(brentq(excess, 0.0, 500.0))


def fixed(runs: int, **sections: object) -> dict[str, object]:
    """Sections of a search of so many trials, scored on public records."""
    tune = {
        "space": {"training.learning_rate": {"choice": [0.1, 0.5], "log_uniform": None}},
        "num_trials": {"name": "fixed", "runs": runs, "mean": None},
        "score": {"public": {"name": "digits"}},
    }
    return {"privacy": {"noise_multiplier": 8.0, "delta": 1e-4}, "tune": tune, **sections}


# --- the price --------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [1, 3, 8])
def test_the_price_is_that_of_all_runs_by_another_accountant(recipe, begin, runs):
    epsilon = begin(recipe(**fixed(runs, **FULL_BATCH))).cost.guarantee.epsilon
    exact = full_batch_epsilon(4 * runs, 8.0, 1e-4)
    assert exact <= epsilon <= exact * 1.005 + 1e-3


def test_the_price_of_sampled_steps_is_that_of_all_runs(recipe, begin):
    search = begin(recipe(**fixed(5, training={"batch_size": 50})))
    step = dp_accounting.PoissonSampledDpEvent(
        50 / search.cost.plan.records, dp_accounting.GaussianDpEvent(8.0)
    )
    other = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    other.compose(dp_accounting.SelfComposedDpEvent(step, 4 * 5))
    assert search.cost.guarantee.epsilon == pytest.approx(other.get_epsilon(1e-4), rel=0.02)


def test_what_a_trial_that_lost_has_released_twice_counts(recipe, begin, run_trials):
    search = begin(recipe(**fixed(3, **FULL_BATCH)))
    run_trials(search)
    facts = load_results(finish(search))
    lost = next(n for n, trial in enumerate(facts.search.trials) if not trial.chosen)
    own = SearchFolder(facts.folder).trial_folder(lost)
    with Ledger.open(own.ledger, own.read_plan().fingerprint()) as ledger:
        ledger.new_epoch("replayed otherwise")
        for step in range(4):
            ledger.record(step, "ab" * 31 + f"{step:02x}")
    exact = full_batch_epsilon(3 * 4 + 4, 8.0, 1e-4)
    after = load_results(facts.folder).guarantee.epsilon
    assert exact <= after <= exact * 1.005 + 1e-3


# --- progress ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_stage_of_every_trial_is_named_in_private(begin, recipe, capsys):
    """Begun, in the middle of its training, trained and not scored yet; nothing of the others."""
    search = begin(recipe(tune={"num_trials": {"name": "binomial", "mean": 4, "runs": 4}}))
    first, second, third, _ = read_trials(search.folder)
    assert search.stages() == []
    for trial in (first, second, third):
        write_json(
            search.folder.settings_file(trial.number),
            {
                "values": trial.values,
                "noise_multiplier": search.trial_noise_multiplier(trial.values),
            },
        )
        job = prepare_trial(search.folder, search.recipe, trial)
        if trial is not first:
            train_until(job, 2 if trial is second else job.plan.steps)
    assert search.stages() == [
        "trial 0 training", "trial 1 training, step 2 of 4", "trial 2 scoring",
    ]  # fmt: skip
    seen = []
    search._report_progress(lambda *numbers: seen.append(numbers[:2]))
    assert seen == [(0, 4)] and search.folder.progress.is_relative_to(search.run_folder.private)
    kept = json.loads(search.folder.progress.read_text())
    assert kept == {"done": 0, "trials": 4, "stages": search.stages()}


@pytest.mark.slow
@pytest.mark.parametrize("num_trials", ["fixed", "binomial"])
def test_a_log_tells_of_trials_only_where_they_are_public(num_trials, begin, recipe, monkeypatch):
    more = {"runs": 2} if num_trials == "fixed" else {"runs": 2, "mean": 2}
    search = begin(recipe(tune={"num_trials": {"name": num_trials, "mean": None, **more}}))
    monkeypatch.setattr(search, "stages", lambda: ["trial 0 training, step 1 of 4"])
    lines: list[str] = []
    monkeypatch.setattr(console, "log", lines.append)
    monkeypatch.setattr(
        search, "run", lambda place, show=None: show and search._report_progress(show)
    )
    with open_executor("local") as executor:
        pipeline.search_stage(search, executor)
    assert any("trial 0 training" in line for line in lines) == (num_trials == "fixed"), lines
    assert any("0 of 2 trials" in line for line in lines) == (num_trials == "fixed")
    if num_trials != "fixed":
        assert not any(word in line for line in lines for word in ("0 of", "2 trials"))
