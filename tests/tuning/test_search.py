"""A search from recipe to released winner, its trials run in this process (Ray: test_on_ray)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from searches import finish
from support.training import parameters

from dpdist import models
from dpdist.cluster.executor import LocalExecutor
from dpdist.core.errors import UserError
from dpdist.core.files import write_json
from dpdist.privacy.budget import read_budgets
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.plan import PrivacyPlan
from dpdist.publishing import write_release
from dpdist.release.verify import verify_release
from dpdist.reports.html import write_report
from dpdist.reports.results import load_results, trial_table
from dpdist.runs.recipe import plan_with_noise
from dpdist.training import worker
from dpdist.training.records import data_source, private_records_between, records_with_canaries
from dpdist.tuning import scoring
from dpdist.tuning import trial as trial_module
from dpdist.tuning.manifest import SearchFolder, draw_number_of_trials, read_scores, read_trials
from dpdist.tuning.search import NoModelError
from dpdist.tuning.space import TrialLimit

EXECUTOR = LocalExecutor()
POISSON = {"name": "poisson", "mean": 3.0}


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
    reports = run_trials(search)
    trials = read_trials(search.folder)
    scores = {n: report[-1][1] for n, report in enumerate(reports)}
    search._charge_budget()
    finish(search)
    run = search.run_folder
    winner = max(scores, key=lambda n: scores[n])
    assert torch.equal(parameters(run), parameters(search.folder.trial_folder(winner)))

    facts = load_results(run)
    assert facts.recipe.tune is None
    chosen = trials[winner].values
    assert facts.recipe.training.learning_rate == chosen["training.learning_rate"]
    assert facts.recipe.certify.sigma == chosen["certify.sigma"]
    assert 3.98 < facts.guarantee.epsilon <= 4.0
    alone = Ledger.read(run.ledger).guarantee(facts.plan).epsilon
    assert alone < 3.6  # one of its trainings, had it been the only one
    (charged,) = read_budgets(asked.privacy.budget)
    assert charged.charges[0].status == "settled"
    assert charged.guarantee(1e-4).epsilon == pytest.approx(facts.guarantee.epsilon)
    assert facts.data_set_guarantee.epsilon == pytest.approx(facts.guarantee.epsilon)
    assert facts.budget_problem is None
    Path(asked.privacy.budget).rename(tmp_path / "elsewhere")
    assert load_results(run).budget_problem  # it was to say what all runs cost
    (tmp_path / "elsewhere").rename(asked.privacy.budget)

    write_report(run)
    write_release(run)
    verify_release(run.release_folder)
    card = json.loads((run.release_folder / "privacy_card.json").read_text())
    assert card["guarantee"]["epsilon"] == facts.guarantee.epsilon
    assert card["mechanism"][0].startswith("the best of a secret random number of runs")
    assert "search" in card["notes"][-1] or "search" in " ".join(card["notes"])

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


def test_a_dry_run_of_a_search_looks_at_its_records_budget(recipe, begin, tmp_path):
    """A search that was charged already passes; a second one that does not fit is refused."""
    ceiling = 3 * begin(recipe(name="alone")).cost.guarantee.epsilon
    budget = {"budget": str(tmp_path / "b"), "budget_ceiling": ceiling}
    first, second = (begin(recipe(name=name, privacy=budget)) for name in ("first", "second"))
    first.check_budget("r.yaml")
    assert not (tmp_path / "b").exists()
    first._charge_budget()
    (before,) = read_budgets(str(tmp_path / "b"))
    first.check_budget("r.yaml")
    with pytest.raises(UserError, match="ceiling"):
        second.check_budget("r.yaml")
    (after,) = read_budgets(str(tmp_path / "b"))
    assert len(after.charges) == 1 and after.spent == before.spent


@pytest.mark.slow
def test_an_interrupted_search_is_continued_to_the_same_end(recipe, begin, run_trials, monkeypatch):
    """Stopped inside a training, before a score and between trials: same keys, settings, scores."""
    fixed = {"run_key": "7f" * 32}
    num_trials = {"name": "fixed", "runs": 3, "mean": None}
    undisturbed = begin(recipe(name="undisturbed", privacy=fixed, tune={"num_trials": num_trials}))
    expected = run_trials(undisturbed)

    asked = recipe(name="disturbed", privacy=fixed, tune={"num_trials": num_trials})
    search = begin(asked)
    manifest = search.folder.manifest.read_bytes()
    terms = search.folder.terms.read_bytes()
    run_trials(search, [0])
    real = worker.run_training

    def stopped_after_two_steps(job, reducer, until=None):
        real(job, reducer, 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(worker, "run_training", stopped_after_two_steps)
        run_trials(search, [1])

    def no_score(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(scoring, "compute_score", no_score)
        run_trials(search, [2])
    assert search._unfinished_trials() == [1, 2]

    again = begin(asked)
    assert again.folder.manifest.read_bytes() == manifest
    assert again.folder.terms.read_bytes() == terms
    assert run_trials(again) == expected
    assert run_trials(again) == expected  # and never scored anew
    for number in range(3):
        ledgers = [Ledger.read(s.folder.trial_folder(number).ledger) for s in (again, undisturbed)]
        assert ledgers[0].release_counts == ledgers[1].release_counts == dict.fromkeys(range(4), 1)
        assert torch.equal(
            parameters(again.folder.trial_folder(number)),
            parameters(undisturbed.folder.trial_folder(number)),
        )
    finish(again)
    finish(undisturbed)
    assert torch.equal(parameters(again.run_folder), parameters(undisturbed.run_folder))
    shown = json.loads((again.run_folder.path / "trials.json").read_text())
    # Of held-out records: a tenth of all, of which nine tenths are trained on.
    records = len(trial_module.scoring_data(again.recipe))
    ratio = records / (again.cost.plan.records / 9)
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


@pytest.mark.slow
def test_the_trials_of_a_fixed_number_are_shown_and_of_a_secret_one_are_not(
    recipe, begin, run_trials, golden, tmp_path
):
    """In Python, in a table and in the report: each trial once, in order, the chosen one named."""
    search = begin(recipe(tune={"num_trials": {"name": "fixed", "runs": 3, "mean": None}}))
    run_trials(search)
    lost = {"scores": [], "done": True, "failed": "<lost> & gone"}
    write_json(search.folder.scores_file(1), lost)
    finish(search)
    facts, field = load_results(search.run_folder), "training.learning_rate"
    drawn = [trial.values[field] for trial in read_trials(search.folder)]
    assert [trial.values[field] for trial in facts.search.trials] == drawn
    header, rows = trial_table(facts)
    assert header == ["trial", field, "noise multiplier", "score", "outcome"]
    assert [row[:3] for row in rows] == [
        [str(n), f"{drawn[n]:.4g}", f"{facts.recipe.privacy.noise_multiplier:.4g}"]
        for n in range(3)
    ]
    assert rows[1][3:] == ["none", "<lost> & gone"]
    best = drawn.index(facts.recipe.training.learning_rate)
    assert [n for n in range(3) if rows[n][4] == "chosen"] == [best]
    scores = [trial.scores for trial in facts.search.trials]
    assert float(rows[best][3]) == pytest.approx(max(s[-1] for s in scores if s), rel=1e-3)
    write_report(search.run_folder)
    page = search.run_folder.report_file.read_text()
    assert "All trials" in page and "&lt;lost&gt; &amp; gone" in page and "<lost>" not in page

    secret = golden("search", tmp_path / "golden")
    facts = load_results(secret)
    assert facts.search.trials == () and trial_table(facts) == ([], [])
    write_report(secret)
    assert "All its trials" not in secret.report_file.read_text()
    assert not secret.trials.exists()
    assert "trials" not in json.loads(secret.search_record.read_text())


@pytest.mark.slow
def test_a_crash_while_the_winner_is_copied_out_is_mended(recipe, begin, run_trials, monkeypatch):
    search = begin(recipe(tune={"num_trials": {"name": "fixed", "runs": 2, "mean": None}}))
    run_trials(search)
    search._choose_winner()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop = (_ for _ in ()).throw
        patch.setattr(search, "_take_along", lambda *run: stop(KeyboardInterrupt()))
        search.run(EXECUTOR)
    with pytest.raises(UserError, match="small: "):
        load_results(search.run_folder)
    again = begin(search.recipe)
    again.run(EXECUTOR)
    assert load_results(again.run_folder).guarantee.epsilon > 0
    begin(search.recipe).run(EXECUTOR)  # a finished search does nothing


@pytest.mark.slow
def test_a_winner_whose_ledger_was_cut_is_not_promoted(recipe, begin, run_trials):
    search = begin(recipe(tune={"num_trials": {"name": "fixed", "runs": 2, "mean": None}}))
    run_trials(search)
    search._choose_winner()
    winner = search.folder.trial_folder(json.loads(search.folder.outcome.read_text())["winner"])
    whole = winner.ledger.read_bytes()
    winner.ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    with pytest.raises(UserError, match="lacks records"):
        search.run(EXECUTOR)
    assert not search.run_folder.training_summary.exists() and not search.run_folder.ledger.exists()
    winner.ledger.write_bytes(whole)
    search.run(EXECUTOR)
    cut = search.run_folder
    cut.ledger.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    with pytest.raises(UserError, match="lacks records"):
        write_release(cut)


def test_a_broken_off_search_releases_nothing(recipe, begin, run_trials):
    asked = recipe(tune={"num_trials": {"name": "fixed", "runs": 2, "mean": None}})
    search = begin(asked)
    run_trials(search, [0])
    with pytest.raises(UserError, match="is not finished"):
        write_release(search.run_folder)
    outside = [p.name for p in search.run_folder.path.iterdir() if p.name != "private"]
    assert sorted(outside) == ["recipe.yaml", "run.json", "search.yaml"]
    from dpdist.training.job import prepare as prepare_training

    with pytest.raises(UserError, match="search"):
        prepare_training(asked, search.run_folder, "r.yaml")


@pytest.mark.slow
def test_failed_trials_count_and_are_not_replaced(recipe, begin, run_trials, monkeypatch):
    """A trial that cannot replay exactly, or fails otherwise, is minus infinity; K stays."""
    num_trials = {"name": "fixed", "runs": 3, "mean": None}
    search = begin(recipe(tune={"num_trials": num_trials}))
    real = scoring.compute_score
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise UserError("the trained parameters are not finite numbers")
        return real(*args, **kwargs)

    monkeypatch.setattr(scoring, "compute_score", failing)
    run_trials(search, [0])
    real_run = worker.run_training

    def other_code(job, reducer, until=None):
        real_run(job, reducer, 2)
        with Ledger.open(job.folder.ledger, job.plan.fingerprint()) as ledger:
            ledger.begin_attempt({"code": "changed in the middle"})
            ledger.record(1, "ab" * 32)
        real_run(job, reducer, until)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "run_training", other_code)
        run_trials(search, [1])
    assert "replayed exactly" in read_scores(search.folder, 1)["failed"]
    run_trials(search)
    states = [read_scores(search.folder, number) for number in range(3)]
    assert [state["failed"] is None for state in states] == [False, False, True]
    finish(search)
    assert json.loads(search.folder.outcome.read_text()) == {"winner": 2}


@pytest.mark.parametrize("why", ["stopped early", "the training could not be replayed exactly"])
def test_a_trial_that_failed_after_a_score_is_not_the_best(recipe, begin, why):
    """A failed trial counts as minus infinity, also if it had the highest score before."""
    search = begin(recipe(tune={"num_trials": {"name": "fixed", "runs": 2, "mean": None}}))
    states = [([0.9], why), ([0.2, 0.3], None)]
    for number, (scores, failed) in enumerate(states):
        state = {"scores": scores, "done": True, "failed": failed}
        write_json(search.folder.scores_file(number), state)
    search._choose_winner()
    assert json.loads(search.folder.outcome.read_text()) == {"winner": 1}


def test_a_full_disk_is_not_a_failed_trial(recipe, begin, monkeypatch):
    """The driver stops at once, with the reason, and gives up no trial: see also tests/hosts."""
    search = begin(recipe(resources={"max_failures": 1}))
    rounds = []

    def meets_a_full_disk(executor, concurrent):
        rounds.append(concurrent)
        search.folder.disk_full_marker.touch()

    monkeypatch.setattr(search, "_run_pass", meets_a_full_disk)
    with pytest.raises(UserError, match="No space"):
        search._run_trials(EXECUTOR, 1)
    assert len(rounds) == 1 and not any(search.folder.path.glob("scores/*"))

    monkeypatch.setattr(search, "_run_pass", lambda *asked: rounds.append(asked))
    search._run_trials(EXECUTOR, 1)  # with room again, workers that are lost each time are given up
    assert len(rounds) == 3 and not search.folder.disk_full_marker.exists()
    assert all(read_scores(search.folder, t.number)["failed"] for t in read_trials(search.folder))


def test_no_model_is_an_outcome(recipe, begin, run_trials):
    """Poisson draws K = 0 with some key; the outcome says the guarantee and cannot be undone."""
    tune = recipe(tune={"num_trials": POISSON}).tune
    keys = (f"{i:064x}" for i in range(500))
    key = next(k for k in keys if draw_number_of_trials(tune.num_trials, bytes.fromhex(k)) == 0)
    asked = recipe(privacy={"run_key": key}, tune={"num_trials": POISSON})
    search = begin(asked)
    assert read_trials(search.folder) == []
    search._choose_winner()
    for attempt in (search, begin(asked)):
        with pytest.raises(NoModelError) as error:
            attempt.run(EXECUTOR)
        assert "DP" in str(error.value)
    assert not search.run_folder.training_summary.exists()


def test_another_recipe_or_data_is_not_continued(recipe, begin):
    begin(recipe())
    with pytest.raises(UserError, match=r"tune\.num_trials\.mean"):
        begin(recipe(tune={"num_trials": {"mean": 9.0}}))
    search = begin(recipe())
    terms = json.loads(search.folder.terms.read_text())
    looser = {**terms["trial"], "delta": 1e-3}
    for change, said in (
        ({"data": "others"}, "private records"),
        ({"plan": looser}, "cost of the search"),
        ({"trial": looser}, "cost of a trial"),
        ({"score_noise": 0.1}, "noise of the"),
    ):
        search.folder.terms.write_text(json.dumps({**terms, **change}))
        with pytest.raises(UserError, match=said):
            begin(recipe())
    search.folder.terms.write_text(json.dumps(terms))
    # Both edited: search.yaml, and what is asked for now.
    other = recipe(training={"batch_size": 199})
    search.run_folder.search_recipe_file.write_text(other.to_yaml())
    with pytest.raises(UserError, match=r"training\.batch_size"):
        begin(other)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tune": {"score": {"public": {"name": "digits", "split": "train"}}}}, "score.public"),
        ({"tune": {"score": {"public": {"name": "mnist"}}}}, "mnist"),
        (
            {"certify": None, "tune": {"score": {"objectives": {"average-radius": 1},
                                                 "radius_cap": 1}}},
            "certify.sigma",
        ),
        (
            {"tune": {"score": {"objectives": {"certified-accuracy": 1}, "radius": 0.5}}},
            "tune.score.radius",
        ),
        (
            {"tune": {"space": {"training.batch_size": {"choice": [100, 5000]}}}},
            "batch_size",
        ),
        ({"privacy": {"adjacency": "replace-one"}}, "tune.score"),
        ({"privacy": {"budget": "b", "budget_ceiling": 0.1}}, "ceiling"),
    ],
)  # fmt: skip
def test_what_cannot_be_searched_leaves_nothing_behind(
    recipe, begin, tmp_path, monkeypatch, sections, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        begin(recipe(**sections)).run(EXECUTOR)
    assert "budget" in sections.get("privacy", {}) or not (tmp_path / "small").exists()


def test_adding_a_record_to_the_data_is_what_the_plan_is_about(recipe, begin):
    """The plan's sampling rate and counts are those of the split; the scoring side is paid too."""
    search = begin(recipe())
    recorded = PrivacyPlan.from_dict(json.loads(search.folder.terms.read_text())["plan"])
    training, scoring = recorded.phases[0].phases[0].parts
    assert recorded.records == search.cost.record_counts.training_records(1.0) < 1439
    assert training[0].sample_rate == 200 / recorded.records
    assert scoring[0].noise_multiplier == search.cost.score_noise
    held = len(trial_module.scoring_data(search.recipe))
    assert held + recorded.records == 1439


@pytest.mark.slow
def test_noise_splits_are_searched_and_each_is_paid_for(recipe, begin, run_trials):
    """Functional's sums share one budget differently: each trial has noise of its own on each,
    none costs more than was accounted, and with less of it no trial would begin."""
    asked = recipe(
        method={"name": "functional", "rounds": 2},
        privacy={"epsilon": 2.0, "noise_multiplier": None, "run_key": "5b" * 32},
        tune={
            "num_trials": {"name": "fixed", "runs": 3, "mean": None},
            "space": {"method.center": {"choice": [0.02, 0.1, 0.2]}},
            "score": {"noise": 20.0},
        },
    )
    del asked.tune.space["training.learning_rate"]
    search = begin(asked)
    run_trials(search)
    one, noise, seen = (
        search.cost.one_training_guarantee.epsilon,
        search.cost.noise_multiplier,
        set(),
    )
    for number in range(3):
        own = search.folder.trial_folder(number)
        plan = PrivacyPlan.from_dict(json.loads(own.plan.read_text()))
        mu = [plan.step(t).noise_multiplier ** -2 for t in range(4)]
        seen.add(read_trials(search.folder)[number].values["method.center"])
        assert mu[0] / sum(mu) == pytest.approx(own.read_recipe().method.center)
        assert sum(mu) ** -0.5 == pytest.approx(noise, rel=2e-3)
        assert 0.99 * one < Ledger.read(own.ledger).guarantee(plan).epsilon <= one * (1 + 1e-3)
        less = plan_with_noise(own.read_recipe(), plan.records, 0.98 * noise)
        with pytest.raises(UserError):
            search.cost.trial_limit.check(less, "here")
    assert len(seen) > 1
    finish(search)
    assert load_results(search.run_folder).guarantee.epsilon <= 2.0


def test_a_trial_beyond_what_was_accounted_is_not_begun(recipe, begin, run_trials):
    """Its own plan is held against the accounted one where it runs, and again before a winner is
    shown: here its settings, then its plan, were changed on the way."""
    search = begin(recipe(tune={"num_trials": {"name": "fixed", "runs": 2, "mean": None}}))
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
    search.folder.trial_folder(0).plan.unlink()
    with pytest.raises(UserError, match="phases"):
        search._check_trials()
    own = search.folder.trial_folder(1)  # its recipe as well, and what is kept of it
    longer = own.read_recipe()
    longer = longer.model_copy(
        update={"training": longer.training.model_copy(update={"steps": raw["phases"][0]["steps"]})}
    )
    own.recipe_file.write_text(longer.to_yaml())
    own.pin_recipe(longer, longer.privacy.noise_multiplier)
    with pytest.raises(UserError, match="not covered"):
        finish(search)
    assert not search.run_folder.training_summary.exists()


def test_every_drawn_trial_is_checked_before_the_first_file(recipe, begin, tmp_path, monkeypatch):
    """Also when the ends of the space told nothing."""
    search = begin(recipe(name="other"))
    allows = TrialLimit.allows
    drawn = {t.values["training.learning_rate"] for t in read_trials(search.folder)}
    seen = []

    def watched(self, plan):
        seen.append(plan)
        return allows(self, plan)

    with monkeypatch.context() as patch:
        patch.setattr(TrialLimit, "allows", watched)
        again = begin(recipe(name="another", privacy={"run_key": "5a" * 32}))
    trials = read_trials(again.folder)
    assert len(seen) >= len(trials) + 3 and drawn
    asked = recipe(name="third")
    with monkeypatch.context() as patch:
        patch.setattr(TrialLimit, "allows", lambda self, plan: False)
        with pytest.raises(UserError, match="not covered"):
            begin(asked)
    assert not (tmp_path / "third").exists()


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
    assert job.plan.records == len(records_with_canaries(job.recipe, job.source))
    assert search.cost.trial_limit.base_plan.records == job.plan.records


@pytest.mark.slow
def test_what_public_parts_are_assumed_to_have_seen_stays_on_the_card(
    recipe, begin, run_trials, tmp_path
):
    """Of every part that a trial may have begun with: the winner was chosen among all of them."""
    parts = []
    for seed, pretraining_data in ((1, "public strokes"), (2, "public letters")):
        spec = models.ModelSpec("linear", (1, 8, 8), 10)
        models.save(models.initialize(spec, seed), spec, tmp_path / str(seed))
        parts.append({"folder": str(tmp_path / str(seed)), "pretraining_data": pretraining_data})
    asked = recipe(
        model={"name": "linear", "initial": parts[0]},
        tune={"space": {"model.initial": {"choice": parts}}},
    )
    search = begin(asked)
    run_trials(search)
    finish(search)
    facts = load_results(search.run_folder)
    assert facts.privacy_card()["extra"]["initial weights trained on"].startswith("public ")
    told = "\n".join(facts.privacy_card()["assumptions"])
    assert "public strokes" in told and "public letters" in told


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
