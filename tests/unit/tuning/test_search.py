"""A search from recipe to released winner, its trials run in this process (Ray: test_on_ray)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from support.searches import finish
from support.training import parameters

from dpdist import pipeline
from dpdist.cluster.executor import LocalExecutor, open_executor
from dpdist.config.search import Domain
from dpdist.core import console
from dpdist.core.errors import UserError
from dpdist.core.files import write_json
from dpdist.privacy.budget import read_budgets
from dpdist.privacy.ledger import Ledger
from dpdist.publishing import write_release
from dpdist.release.verify import verify_release
from dpdist.reports.html import write_report
from dpdist.reports.results import load_results, trial_table
from dpdist.runs.folder import RunFolder
from dpdist.training import worker
from dpdist.training.job import prepare as prepare_training
from dpdist.training.records import data_source, private_records_between, records_with_canaries
from dpdist.tuning import scoring
from dpdist.tuning import search as search_module
from dpdist.tuning import trial as trial_module
from dpdist.tuning.manifest import (
    SearchFolder,
    draw_number_of_trials,
    read_scores,
    read_terms,
    read_trials,
)
from dpdist.tuning.search import NoModelError

EXECUTOR = LocalExecutor()
POISSON = {"name": "poisson", "mean": 3.0}


FIXED_TWO = {"name": "fixed", "runs": 2, "mean": None}


def two(recipe, **tune: object):
    return recipe(tune={"num_trials": FIXED_TWO, **tune})


@pytest.mark.slow
def test_the_winner_becomes_an_ordinary_run_with_the_search_in_its_guarantee(
    recipe, begin, run_trials, tmp_path
):
    asked = recipe(
        privacy={"epsilon": 4.0, "noise_multiplier": None, "budget": str(tmp_path / "budget")},
        tune={
            "space": {
                "training.learning_rate": {"log_uniform": [0.1, 1.0]},
                "certify.sigma": {"choice": [0.1, 0.2]},
            },
            "score": {
                "objectives": {"certified-accuracy": 1.0}, "radius": 0.02, "samples": 10,
                "private_eval_fraction": 0.05,
            },
        },
    )  # fmt: skip
    search = begin(asked)
    scores = [report[-1][1] for report in run_trials(search)]
    search._charge_budget()
    finish(search)
    run, winner = search.run_folder, scores.index(max(scores))
    assert torch.equal(parameters(run), parameters(search.folder.trial_folder(winner)))

    facts, chosen = load_results(run), read_trials(search.folder)[winner].values
    assert facts.recipe.tune is None
    assert facts.recipe.training.learning_rate == chosen["training.learning_rate"]
    assert facts.recipe.certify.sigma == chosen["certify.sigma"]
    assert 3.98 < facts.guarantee.epsilon <= 4.0
    alone = Ledger.read(run.ledger).guarantee(facts.plan).epsilon
    assert alone < 3.6  # one of its trainings, had it been the only one
    (charged,) = read_budgets(asked.privacy.budget)
    assert charged.charges[0].status == "settled"
    assert charged.guarantee(1e-4).epsilon == pytest.approx(facts.guarantee.epsilon)
    assert facts.data_set_guarantee.epsilon == pytest.approx(facts.guarantee.epsilon)
    Path(asked.privacy.budget).rename(tmp_path / "elsewhere")
    assert load_results(run).budget_problem and not facts.budget_problem
    (tmp_path / "elsewhere").rename(asked.privacy.budget)

    write_report(run)
    write_release(run)
    verify_release(run.release_folder)
    card = json.loads((run.release_folder / "privacy_card.json").read_text())
    assert card["guarantee"]["epsilon"] == facts.guarantee.epsilon
    assert "seconds" not in run.training_summary.read_text()  # which depend on other trials


def test_a_law_without_a_renyi_bound_meets_budgets(recipe, begin, tmp_path):
    """A binomial number of trials: priced by its losses, it is charged to a budget without a
    ceiling, and to one that runs may not choose each other by; a filter refuses it, unspent."""
    num_trials = {"name": "binomial", "mean": 3.0, "runs": 4}

    def asked(name: str, **privacy: object):
        budget = {"budget": str(tmp_path / name), **privacy}
        return recipe(
            name=name, privacy={"noise_multiplier": 8.0, **budget}, tune={"num_trials": num_trials}
        )

    for name, ceiling in (
        ("open", {}),
        ("together", {"budget_ceiling": 9.0, "budget_composition": "non-adaptive"}),
    ):
        search = begin(asked(name, **ceiling))
        search._charge_budget()
        (charged,) = read_budgets(str(tmp_path / name))
        total = search.cost.guarantee
        assert total.source.startswith("PLD of best-of-K")
        assert charged.guarantee(1e-4).epsilon == pytest.approx(total.epsilon, rel=1e-6)
    filtered = begin(asked("filtered", budget_ceiling=9.0))
    for refuses in (filtered._charge_budget, lambda: filtered.check_budget("r.yaml")):
        with pytest.raises(UserError, match="Renyi"):
            refuses()
    assert not any(one.charges for one in read_budgets(str(tmp_path / "filtered")))


@pytest.mark.slow
def test_an_interrupted_search_is_continued_to_the_same_end(recipe, begin, run_trials, monkeypatch):
    """Stopped inside a training, before a score and between trials: same keys, settings, scores."""
    given = {
        "privacy": {"run_key": "7f" * 32},
        "tune": {"num_trials": {"name": "fixed", "runs": 3, "mean": None}},
    }
    undisturbed = begin(recipe(name="undisturbed", **given))
    expected = run_trials(undisturbed)
    asked = recipe(name="disturbed", **given)
    search = begin(asked)
    files = (search.folder.manifest, search.folder.terms)
    before = [path.read_bytes() for path in files]
    run_trials(search, [0])
    real = worker.run_training

    def stopped_after_two_steps(job, reducer, until=None):
        real(job, reducer, 2)
        raise KeyboardInterrupt

    def no_score(*args, **kwargs):
        raise KeyboardInterrupt

    for number, module, name, broken in (
        (1, worker, "run_training", stopped_after_two_steps),
        (2, scoring, "compute_score", no_score),
    ):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(module, name, broken)
            run_trials(search, [number])
    assert search._unfinished_trials() == [1, 2]

    again = begin(asked)
    assert [path.read_bytes() for path in files] == before
    assert run_trials(again) == expected
    assert run_trials(again) == expected  # and never scored anew
    for number in range(3):
        own, other = (s.folder.trial_folder(number) for s in (again, undisturbed))
        for folder in (own, other):
            assert Ledger.read(folder.ledger).release_counts == dict.fromkeys(range(4), 1)
        assert torch.equal(parameters(own), parameters(other))
    finish(again)
    finish(undisturbed)
    assert torch.equal(parameters(again.run_folder), parameters(undisturbed.run_folder))
    shown = json.loads((again.run_folder.path / "trials.json").read_text())
    # Of held-out records: a tenth of all, of which nine tenths are trained on.
    ratio = len(trial_module.scoring_data(again.recipe)) / (again.cost.plan.records / 9)
    assert not 0.99 < ratio < 1.01
    for row, report in zip(shown, expected, strict=True):
        assert row["scores"] == pytest.approx([score * ratio for _, score in report])


@pytest.mark.slow
def test_a_rung_that_was_scored_is_never_scored_again(recipe, begin, run_trials, monkeypatch):
    """After a crash its model is that of a later rung: the same noise on another count would cancel
    in their difference."""
    asked = recipe(
        tune={"num_trials": {"name": "fixed", "runs": 1, "mean": None}, "asha": {"rungs": 2}}
    )
    search, real, keys = begin(asked), scoring.compute_score, []

    def noted(*args, key, **more):
        keys.append(key)
        if len(keys) == 2:
            raise KeyboardInterrupt  # trained to the end, and not scored
        return real(*args, key=key, **more)

    monkeypatch.setattr(scoring, "compute_score", noted)
    with pytest.raises(KeyboardInterrupt):
        run_trials(search)
    (first,) = read_scores(search.folder, 0)["scores"]
    (report,) = run_trials(search)
    assert [value for _, value in report] == read_scores(search.folder, 0)["scores"]
    assert report[0] == (1, first) and len(report) == 2
    assert keys[0] not in keys[1:] and keys[1:] == [keys[1]] * 2


def test_the_table_of_trials_shows_the_values_of_linked_fields():
    space = {
        "certify.sigma": Domain(choice=(0.1, 0.2), linked=("method.sigma",)),
        "method.split": Domain(choice=(1, 2), linked={"training.momentum": (0.5, 0.9)}),
    }
    trial = SimpleNamespace(
        values={"certify.sigma": 0.2, "method.split": 2},
        scores=[0.5],
        noise_multiplier=1.0,
        failed=None,
        chosen=True,
    )
    fields = ("certify.sigma", "method.sigma", "method.split", "training.momentum")
    asked = SimpleNamespace(tune=SimpleNamespace(space=space))
    facts = SimpleNamespace(
        search=SimpleNamespace(fields=fields, trials=(trial,)),
        folder=SimpleNamespace(read_search_recipe=lambda: asked),
    )
    assert trial_table(facts)[1][0][1:5] == ["0.2", "0.2", "2", "0.9"]


@pytest.mark.slow
def test_the_trials_of_a_fixed_number_are_shown_and_of_a_secret_one_are_not(
    recipe, begin, run_trials, golden, tmp_path
):
    search = begin(two(recipe))
    run_trials(search, [0])
    lost = {"scores": [], "done": True, "failed": "lost"}
    write_json(search.folder.scores_file(1), lost)
    finish(search)
    facts, field = load_results(search.run_folder), "training.learning_rate"
    drawn = [trial.values[field] for trial in read_trials(search.folder)]
    assert [trial.values[field] for trial in facts.search.trials] == drawn
    assert [trial.chosen for trial in facts.search.trials] == [True, False]
    assert len(trial_table(facts)[1]) == 2

    secret = golden("search", tmp_path / "golden")
    facts = load_results(secret)
    assert facts.search.trials == () and trial_table(facts) == ([], [])
    assert not secret.trials.exists()
    assert "trials" not in json.loads(secret.search_record.read_text())


@pytest.mark.slow
def test_a_crash_while_the_winner_is_copied_out_is_mended(recipe, begin, run_trials, monkeypatch):
    search = begin(two(recipe))
    run_trials(search)
    search._choose_winner()

    def crash(*run: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "_take_along", crash)
    with pytest.raises(KeyboardInterrupt):
        search.run(EXECUTOR)
    with pytest.raises(UserError):
        load_results(search.run_folder)
    again = begin(search.recipe)
    again.run(EXECUTOR)
    assert load_results(again.run_folder).guarantee.epsilon > 0
    begin(search.recipe).run(EXECUTOR)  # a finished search does nothing


def test_a_broken_off_search_releases_nothing(recipe, begin, run_trials):
    asked = two(recipe)
    search = begin(asked)
    run_trials(search, [0])
    outside = [p.name for p in search.run_folder.path.iterdir() if p.name != "private"]
    assert sorted(outside) == ["recipe.yaml", "run.json", "search.yaml"]
    for read in (write_release, lambda run: prepare_training(asked, run, "r.yaml")):
        with pytest.raises(UserError):
            read(search.run_folder)


def test_a_trial_that_failed_after_a_score_is_not_the_best(recipe, begin):
    """A failed trial counts as minus infinity, also if it had the highest score before; and only
    the last score of a trial counts."""
    search = begin(recipe(tune={"num_trials": {"name": "fixed", "runs": 3, "mean": None}}))
    for number, (scores, failed) in enumerate(
        [([0.9], "lost"), ([0.2, 0.3], None), ([0.8, 0.1], None)]
    ):
        state = {"scores": scores, "done": True, "failed": failed}
        write_json(search.folder.scores_file(number), state)
    search._choose_winner()
    assert json.loads(search.folder.outcome.read_text()) == {"winner": 1}


def test_no_model_is_an_outcome(recipe, begin):
    """Poisson draws K = 0 with some key; the outcome says the guarantee and cannot be undone."""
    tune = recipe(tune={"num_trials": POISSON}).tune
    keys = (f"{i:064x}" for i in range(500))
    key = next(k for k in keys if draw_number_of_trials(tune.num_trials, bytes.fromhex(k)) == 0)
    asked = recipe(privacy={"run_key": key}, tune={"num_trials": POISSON})
    search = begin(asked)
    assert read_trials(search.folder) == []
    search._choose_winner()
    for attempt in (search, begin(asked)):
        with pytest.raises(NoModelError, match="DP"):
            attempt.run(EXECUTOR)
    assert not search.run_folder.training_summary.exists()


def test_another_recipe_or_data_is_not_continued(recipe, begin):
    search = begin(recipe())
    with pytest.raises(UserError, match=r"tune\.num_trials\.mean"):
        begin(recipe(tune={"num_trials": {"mean": 9.0}}))
    terms = json.loads(search.folder.terms.read_text())
    looser = {**terms["trial"], "delta": 1e-3}
    for change in ({"data": "x"}, {"plan": looser}, {"trial": looser}, {"score_noise": 0.1}):
        search.folder.terms.write_text(json.dumps({**terms, **change}))
        with pytest.raises(UserError):
            begin(recipe())
    search.folder.terms.write_text(json.dumps(terms))
    begin(recipe())


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"tune": {"score": {"public": {"name": "digits", "split": "train"}}}}, "score.public"),
        ({"certify": None,
          "tune": {"score": {"objectives": {"average-radius": 1}, "radius_cap": 1}}},
         "certify.sigma"),
        ({"tune": {"score": {"objectives": {"certified-accuracy": 1}, "radius": 0.5}}},
         "tune.score.radius"),
        ({"tune": {"space": {"training.batch_size": {"choice": [100, 5000]}}}}, "batch_size"),
        ({"privacy": {"adjacency": "replace-one"}}, "tune.score"),
        ({"privacy": {"budget": "b", "budget_ceiling": 0.1}}, "ceiling"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_leaves_nothing_behind(
    recipe, begin, tmp_path, monkeypatch, sections, key
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(key)):
        begin(recipe(**sections)).run(EXECUTOR)
    assert "budget" in sections.get("privacy", {}) or not (tmp_path / "small").exists()


def test_a_trial_beyond_what_was_accounted_is_not_begun(recipe, begin, run_trials):
    """Its own plan is held against the accounted one where it runs, and again before a winner is
    shown: here its settings, then its plan, were changed on the way."""
    search = begin(two(recipe))
    run_trials(search, [])
    path = search.folder.settings_file(0)
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "noise_multiplier": 3.9}))
    run_trials(search)
    assert read_scores(search.folder, 0)["failed"]
    assert not search.folder.trial_folder(0).ledger.exists()
    assert read_scores(search.folder, 1)["failed"] is None

    plan = search.folder.trial_folder(1).plan
    raw = json.loads(plan.read_text())
    raw["phases"][0]["steps"] += 1
    plan.write_text(json.dumps(raw))
    with pytest.raises(UserError):
        finish(search)
    assert not search.run_folder.training_summary.exists()


@pytest.mark.parametrize("public", [False, True], ids=["scored on private", "on public"])
def test_records_kept_out_of_the_run_are_kept_out_of_its_search(recipe, begin, public):
    """Record by record: data.private_eval_fraction's, those that trials are scored on, and those
    that they and the final model are trained on have nothing in common, and are all there are."""
    score = {"public": {"name": "digits"}} if public else {"private_eval_fraction": 0.2}
    data = {"private_eval_fraction": 0.3, "public": 0.1}
    asked = recipe(data=data, tune={"num_trials": {"name": "fixed", "runs": 1, "mean": None},
                                    "score": score})  # fmt: skip
    search = begin(asked)
    source = data_source(asked)
    aside = set(private_records_between(asked, source, 0.0, 0.3).hashes)
    everything = set(private_records_between(asked, source, 0.0, 1.0).hashes)
    (trial,) = read_trials(search.folder)
    noise = search.trial_noise_multiplier(trial.values)
    write_json(search.folder.settings_file(0), {"values": trial.values, "noise_multiplier": noise})
    job = trial_module.prepare_trial(search.folder, asked, trial)
    trained = set(records_with_canaries(job.recipe, job.source).hashes)
    scored = set() if public else set(trial_module.scoring_data(asked).hashes)
    assert aside and trained and bool(scored) != public
    assert not (aside & trained or aside & scored or scored & trained)
    assert aside | trained | scored == everything
    assert everything <= set(search.budget_records().hashes)  # all of them pay
    assert job.plan.records == len(records_with_canaries(job.recipe, job.source))
    assert search.cost.trial_limit.base_plan.records == job.plan.records


def test_what_knows_of_one_training_states_no_epsilon(golden, tmp_path):
    """A trial alone, and the winner whose terms are lost: the ledger is of one training only."""
    run = golden("search", tmp_path)
    folder = SearchFolder(run)
    for trial in map(folder.trial_folder, range(len(read_trials(folder)))):
        for read in (load_results, write_release):
            with pytest.raises(UserError, match="search"):
                read(trial)
    run.search_record.unlink()
    for read in (load_results, write_release):
        with pytest.raises(UserError, match=r"search\.json: is missing"):
            read(run)


def full_batch_epsilon(steps: int, noise: float, delta: float) -> float:
    """Closed form for `steps` Gaussian releases of all records (Balle and Wang 2018)."""
    mu = math.sqrt(steps) / noise

    def excess(epsilon: float) -> float:
        left = norm.cdf(mu / 2 - epsilon / mu)
        return left - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return float(brentq(excess, 0.0, 500.0))


@pytest.mark.slow
@pytest.mark.parametrize("num_trials", ["fixed", "binomial"])
def test_a_log_tells_of_trials_only_where_they_are_public(num_trials, begin, recipe, monkeypatch):
    mean = None if num_trials == "fixed" else 2
    search = begin(recipe(tune={"num_trials": {"name": num_trials, "runs": 2, "mean": mean}}))
    monkeypatch.setattr(search, "stages", lambda: ["trial 0 training, step 1 of 4"])
    lines: list[str] = []
    monkeypatch.setattr(console, "log", lines.append)
    monkeypatch.setattr(
        search, "run", lambda place, show=None: show and search._report_progress(show)
    )
    with open_executor("local") as executor:
        pipeline.search_stage(search, executor)
    for word in ("trial 0 training", "0 of", "2 trials"):
        assert any(word in line for line in lines) == (num_trials == "fixed"), lines


def test_the_price_is_that_of_all_runs_and_of_what_a_lost_one_released_twice(
    recipe, begin, run_trials
):
    def check(found: float, steps: int) -> None:
        exact = full_batch_epsilon(steps, 8.0, 1e-4)
        assert exact <= found <= exact * 1.005 + 1e-3

    asked = recipe(
        privacy={"noise_multiplier": 8.0},
        training={"batch_size": 1439, "steps": 4},
        tune={
            "num_trials": {"name": "fixed", "runs": 3, "mean": None},
            "score": {"public": {"name": "digits"}},
        },
    )
    search = begin(asked)
    check(search.cost.guarantee.epsilon, 3 * 4)
    run_trials(search)
    facts = load_results(finish(search))
    lost = next(n for n, trial in enumerate(facts.search.trials) if not trial.chosen)
    release_again(SearchFolder(facts.folder).trial_folder(lost), range(4))
    check(load_results(facts.folder).guarantee.epsilon, 3 * 4 + 4)
    release_again(facts.folder, range(3))  # the winner
    check(load_results(facts.folder).guarantee.epsilon, 3 * 4 + 4 + 3)


def release_again(run: RunFolder, steps: Iterable[int]) -> None:
    with Ledger.open(run.ledger, run.read_plan().fingerprint()) as ledger:
        ledger.new_epoch("replayed otherwise")
        for step in steps:
            ledger.record(step, "ab" * 31 + f"{step:02x}")


def test_a_trial_with_other_releases_than_its_own_steps_is_not_the_winner(
    recipe, begin, run_trials, monkeypatch
):
    """One that was not replayed exactly has failed; a winner whose ledger was cut is not copied."""
    real = trial_module.train_until

    def train_twice(job, step: int) -> None:
        real(job, step)
        release_again(job.folder, [0])

    search = begin(two(recipe))
    run_trials(search, [0])
    monkeypatch.setattr(trial_module, "train_until", train_twice)
    run_trials(search, [1])
    assert read_scores(search.folder, 0)["failed"] is None
    assert read_scores(search.folder, 1)["failed"] and not read_scores(search.folder, 1)["scores"]

    ledger = search.folder.trial_folder(0).ledger
    ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError):
        finish(search)
    assert not search.run_folder.training_summary.exists()


def test_what_is_assumed_of_any_trial_s_public_part_is_on_record(recipe, begin, monkeypatch):
    parts = iter([{"assumed": "a part is public"}, None, {"assumed": None}])

    def checked(trial, context: str):
        return None, next(parts, None)

    monkeypatch.setattr(search_module, "check_trainable", checked)
    assert read_terms(begin(recipe()).folder)["assumed"] == ["a part is public"]


def test_a_full_disk_is_not_a_failed_trial(recipe, begin, monkeypatch):
    """The driver stops at once and gives up no trial: see also tests/hosts."""
    search = begin(recipe(resources={"max_failures": 1}))
    rounds = []

    def meets_a_full_disk(*asked):
        rounds.append(asked)
        search.folder.disk_full_marker.touch()

    monkeypatch.setattr(search, "_run_pass", meets_a_full_disk)
    with pytest.raises(UserError):
        search._run_trials(EXECUTOR, 1)
    assert len(rounds) == 1 and not any(search.folder.path.glob("scores/*"))
