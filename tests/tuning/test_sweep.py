"""Ordinary sweeps: what they say of privacy, what is composed where privacy is on, and refusals."""

from __future__ import annotations

import json
import math

import dp_accounting
import pytest
import yaml
from dp_accounting.pld import PLDAccountant
from scipy.optimize import brentq
from scipy.stats import norm
from support.local_execution import command, run_without_ray
from support.recipes import write_recipe

from dpdist import pipeline
from dpdist.cluster.executor import open_executor
from dpdist.core import console
from dpdist.core.errors import UserError
from dpdist.core.files import write_json
from dpdist.privacy.ledger import Ledger
from dpdist.reports.facts import read_facts
from dpdist.runs.recipe import parse_recipe
from dpdist.tuning.manifest import SearchFolder, read_trials
from dpdist.tuning.sweep import NOT_PRIVATE, begin_sweep, sweep_function
from dpdist.tuning.sweep_recipe import (
    SweepSettings,
    count_releases,
    describe_releases,
    is_public_recipe,
    parse_metric,
    private_sweep_recipe,
    read_space,
)
from dpdist.tuning.trial import prepare_trial, train_until

SPACE = {"training.learning_rate": {"choice": [0.1, 0.5]}}
SMALL = {
    "name": "small",
    "data": {"name": "digits", "max_train": 300},
    "model": "linear",
    "privacy": "none",
    "training": {"batch_size": 50, "steps": 4, "learning_rate": 0.5},
}


def small(privacy: object = "none", **sections: object):
    return parse_recipe({**SMALL, "privacy": privacy, **sections}, "r.yaml")


# --- what is declared public ------------------------------------------------------------------


def test_a_training_without_noise_asks_for_no_delta():
    for given in ("none", {"noise_multiplier": 0, "clipping": "none"}, {"noise_multiplier": 0}):
        found = small(given)
        assert found.privacy.noise_multiplier == 0 and is_public_recipe(found)
        assert parse_recipe(yaml.safe_load(found.to_yaml()), "again") == found
    with pytest.raises(UserError, match=r"privacy\.delta: is required"):
        small({"noise_multiplier": 1.0})
    with pytest.raises(UserError, match=r"privacy\.delta: is required"):
        small({"epsilon": 1.0})
    for wrong in ("off", False, "no"):
        with pytest.raises(UserError, match="privacy: must be a section, or none"):
            small(wrong)


def test_public_is_what_promises_nothing_and_says_so():
    assert not is_public_recipe(small({"noise_multiplier": 1.0, "delta": 1e-4}))
    assert not is_public_recipe(small({"epsilon": 1.0, "delta": 1e-4}))
    # noise, but no theorem: it does not say that its records are public
    refuted = {"noise_multiplier": 1.0, "delta": 1e-4, "clipping": "none"}
    with pytest.raises(UserError, match="without privacy"):
        small(refuted)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ({}, "space: must map fields of the recipe to their values"),
        ({"training.steps": {"choice": []}}, "choice must not be empty"),
        ({"training.steps": {"integer": [1]}}, "space: training.steps.integer"),
        ({"training.steps": 5}, "space: training.steps"),
        ({"training.steps": {"from": 5}}, "space: training.steps.from: unknown key"),
    ],
)
def test_a_space_that_is_none_is_refused(space, said, tmp_path):
    with pytest.raises(UserError, match=said):
        read_space(space)
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(space))
    with pytest.raises(UserError, match=r"space\.yaml: "):
        read_space(path)


def test_metrics_and_settings():
    assert parse_metric("cross-entropy") is None
    assert parse_metric("certified-accuracy@0.25") == {
        "objectives": {"certified-accuracy": 1.0}, "radius": 0.25,
    }  # fmt: skip
    for wrong in ("loss", "certified-accuracy", "average-radius@x", "accuracy@1"):
        with pytest.raises(UserError, match="metric: must be accuracy, cross-entropy"):
            parse_metric(wrong)
    for key, value, said in (
        ("mode", "best", "mode: must be max or min, got 'best'"),
        ("num_samples", 0, "samples: must be >= 1, got 0"),
        ("concurrent", 0, "concurrent: must be >= 1, got 0"),
    ):
        with pytest.raises(UserError, match=said):
            SweepSettings("accuracy", **{key: value})


# --- privacy on: what is composed -------------------------------------------------------------


def full_batch_epsilon(steps: int, noise: float, delta: float) -> float:
    """Closed form for `steps` Gaussian releases of all records (Balle and Wang 2018)."""
    mu = math.sqrt(steps) / noise

    def excess(epsilon: float) -> float:
        left = norm.cdf(mu / 2 - epsilon / mu)
        return left - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return float(brentq(excess, 0.0, 500.0))


def private(settings: SweepSettings, space=SPACE, scores: str | None = "digits", **sections):
    asked = small({"noise_multiplier": 8.0, "delta": 1e-4}, **sections)
    return private_sweep_recipe(asked, read_space(space), settings, scores, "r.yaml")


def full_batch() -> dict[str, object]:
    """Sections with which every step takes all 1,439 records of digits, once."""
    return {
        "data": {"name": "digits"},
        "training": {"batch_size": 1439, "steps": 4, "learning_rate": 0.5},
    }


@pytest.mark.guarantee
@pytest.mark.parametrize("runs", [1, 3, 8])
def test_the_price_is_that_of_all_runs_by_another_accountant(begin, runs):
    asked = private(SweepSettings("accuracy", num_samples=runs), **full_batch())
    epsilon = begin(asked.model_copy(update={"name": f"n{runs}"})).cost.guarantee.epsilon
    exact = full_batch_epsilon(4 * runs, 8.0, 1e-4)
    assert exact <= epsilon <= exact * 1.005 + 1e-3


@pytest.mark.guarantee
def test_the_price_of_sampled_steps_is_that_of_all_runs(begin):
    asked = private(SweepSettings("accuracy", num_samples=5))
    search = begin(asked)
    records = search.cost.plan.records
    step = dp_accounting.PoissonSampledDpEvent(50 / records, dp_accounting.GaussianDpEvent(8.0))
    other = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    other.compose(dp_accounting.SelfComposedDpEvent(step, 4 * 5))
    assert search.cost.guarantee.epsilon == pytest.approx(other.get_epsilon(1e-4), rel=0.02)


@pytest.mark.guarantee
def test_ledgers_count_every_run_also_the_stopped_and_the_failed(begin, run_trials, tmp_path):
    """Four planned: two ran, one stopped after 2 of 4 steps, one never began."""
    search = begin(private(SweepSettings("accuracy", num_samples=4), **full_batch()))
    run_trials(search, [0, 1])
    folder = search.folder
    third = next(t for t in _trials(search) if t.number == 2)
    train_until(prepare_trial(folder, search.recipe, third), 2)
    begun, counted = count_releases(search.run_folder)
    exact = full_batch_epsilon(4 + 4 + 2, 8.0, 1e-4)
    assert begun == 3 and exact <= counted.epsilon <= exact * 1.005 + 1e-3
    assert counted.epsilon < search.cost.guarantee.epsilon
    ((name, said),) = describe_releases(search.run_folder)
    assert name == "by the ledgers" and "3 of 4" in said
    # a failed trial's score does not take its releases back
    state = {"scores": [], "done": True, "failed": "lost"}
    folder.scores_file(0).write_text(json.dumps(state))
    assert count_releases(search.run_folder)[1] == counted


def _trials(search):
    return read_trials(search.folder)


@pytest.mark.guarantee
def test_a_target_epsilon_is_that_of_all_runs_together(begin):
    asked = small({"epsilon": 2.0, "delta": 1e-4})
    asked = private_sweep_recipe(
        asked, read_space(SPACE), SweepSettings("accuracy", num_samples=6), "digits", "r.yaml"
    )
    cost = begin(asked).cost
    assert 1.99 < cost.guarantee.epsilon <= 2.0
    assert cost.one_training_guarantee.epsilon < 1.2


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ({"scheduler": "pbt"}, {}, "scheduler: must be asha, or left out where privacy is on"),
        ({"scheduler": object()}, {}, "scheduler: must be asha, or left out .* got object"),
        ({"searcher": "hyperopt"}, {}, "searcher: must be random or optuna where privacy is on"),
        ({"mode": "min"}, {}, "with mode max where privacy is on"),
        ({"metric": "cross-entropy"}, {}, "with mode max where privacy is on"),
        ({"seed": 1}, {}, "seed: must be left out where privacy is on"),
        ({}, {"scores": None}, "public scores: required where privacy is on"),
        (
            {},
            {"space": {"privacy.noise_multiplier": {"choice": [0, 8]}}},
            "must promise something in every trial of a sweep, and with privacy.noise_multiplier 0",
        ),
    ],
)
def test_what_cannot_be_composed_is_refused_in_one_line(settings, options, said):
    with pytest.raises(UserError, match=said) as refused:
        private(SweepSettings(**{"metric": "accuracy", **settings}), **options)
    assert str(refused.value).count("\n") == 0


@pytest.mark.guarantee
def test_public_scores_may_not_be_of_the_private_records(begin):
    asked = private(SweepSettings("accuracy", num_samples=2), scores="digits/train")
    with pytest.raises(UserError, match="used as if they were public"):
        begin(asked)


@pytest.mark.long
@pytest.mark.whole
def test_a_sweep_with_privacy_on_shows_the_total_and_all_its_trials(tmp_path, monkeypatch, capsys):
    """The whole command, its trials in this process: terminal, report and Python say one total."""
    path = write_recipe(tmp_path, {**SMALL, "privacy": {"noise_multiplier": 8.0, "delta": 1e-4}})
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(SPACE))
    run_without_ray(monkeypatch)
    words = ("sweep", path, "--space", "space.yaml", "--samples", 3, "--public-scores", "digits")
    done = command(monkeypatch, capsys, tmp_path, *words)
    assert done.code == 0, done.err
    facts = read_facts(tmp_path / "runs" / "small-sweep")
    (total,) = {line for line in done.out.splitlines() if line.startswith("privacy")}
    assert f"epsilon = {math.ceil(facts.guarantee.epsilon * 1e4) / 1e4:.4g}" in total
    assert facts.guarantee.epsilon > 1.5 * facts.search.one_training_epsilon > 0
    assert "NOT PRIVATE" not in done.out and "3 of 3 released" in done.out
    assert "3 trainings on the same private records, and all of them count" in done.err
    assert len(facts.search.trials) == 3 and "all trials" in done.out
    page = facts.folder.report_file.read_text()
    assert "All its trials; each is paid for" in page and "fixed, 3 trials" in page
    assert '<th scope="row">chosen</th><td>training.learning_rate 0.' in page
    again = command(monkeypatch, capsys, tmp_path, *words)
    assert again.code == 0 and "search: finished before" in again.err

    # What a trial that lost has released twice counts, on the page and in the ledgers' sum.
    lost = next(n for n, trial in enumerate(facts.search.trials) if not trial.chosen)
    own = SearchFolder(facts.folder).trial_folder(lost)
    with Ledger.open(own.ledger, own.read_plan().fingerprint()) as ledger:
        ledger.new_epoch("replayed otherwise")
        for step in range(4):
            ledger.record(step, "ab" * 31 + f"{step:02x}")
    after = read_facts(facts.folder)
    counted = count_releases(facts.folder)[1].epsilon
    assert after.guarantee.epsilon == pytest.approx(counted)
    assert counted > 1.1 * facts.guarantee.epsilon


# --- ordinary sweeps --------------------------------------------------------------------------


def test_a_folder_belongs_to_one_sweep(tmp_path):
    begin_sweep(tmp_path / "s", {"metric": "a", "space": {"x": "1"}})
    begin_sweep(tmp_path / "s", {"metric": "a", "space": {"x": "1"}})
    record = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert record["privacy"] == NOT_PRIVATE and NOT_PRIVATE.startswith("NOT PRIVATE: ")
    with pytest.raises(UserError, match=r"asked for otherwise \(space.x differ\)"):
        begin_sweep(tmp_path / "s", {"metric": "a", "space": {"x": "2"}})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UserError, match="holds something else than a sweep"):
        begin_sweep(tmp_path / "other", {})


@pytest.mark.parametrize(
    ("more", "space", "said"),
    [
        ({"scheduler": "pbt"}, SPACE, "must not change settings in the middle of a training"),
        ({"scheduler": "hyperbolic"}, SPACE, "scheduler: must be asha, median or"),
        ({"searcher": "grid"}, SPACE, "searcher: must be random, optuna, hyperopt"),
        ({"metric": "certified-accuracy@0.5"}, SPACE, "certified objectives need certify.sigma"),
        ({}, {"training.rate": {"choice": [1]}}, "space.training.rate: .* no such field"),
        ({}, {"data.name": {"choice": ["mnist"]}}, "cannot be searched"),
        (
            {},
            {"privacy.noise_multiplier": {"choice": [0, 1]},
             "privacy.clipping": {"choice": ["flat"]}},
            "must leave privacy off in every trial of an ordinary sweep",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_swept_is_refused_before_anything_is_written(more, space, said, tmp_path):
    with pytest.raises(UserError, match=said):
        pipeline.sweep(SMALL, space, folder=tmp_path / "s", **more)
    assert not (tmp_path / "s").exists()


def test_a_function_of_a_sweep_is_one(tmp_path):
    with pytest.raises(UserError, match=r"train: must be a function .* dpdist\.pipeline\.sweep"):
        sweep_function("digits", SPACE, folder=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_searcher_that_is_not_installed_is_told(tmp_path, monkeypatch):
    import sys

    for name, extra in (("optuna", "tune"), ("hyperopt", "hyperopt")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=rf"needs {name} .*pip install 'dpdist\[{extra}\]'"):
            pipeline.sweep(SMALL, SPACE, folder=tmp_path / "s", searcher=name)


# --- progress ---------------------------------------------------------------------------------


@pytest.mark.long
def test_the_stage_of_every_trial_is_named_in_private(begin, recipe, capsys):
    """Begun, in the middle of its training, trained and not scored yet; nothing of the others."""
    search = begin(recipe(tune={"law": {"name": "binomial", "mean": 4, "runs": 4}}))
    first, second, third, _ = _trials(search)
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


def test_the_rate_of_a_search_that_goes_on_is_that_of_this_session(begin, recipe, monkeypatch):
    search = begin(recipe(tune={"law": {"name": "fixed", "mean": None, "runs": 4}}))
    trials, unfinished, seen = _trials(search), [0, 1], []
    monkeypatch.setattr(search, "_unfinished_trials", lambda: unfinished)
    for count in (2, 2, 1):  # two were finished in an earlier session
        del unfinished[count:]
        search._report_progress(lambda *numbers: seen.append(numbers[:3]))
    assert [each[:2] for each in seen] == [(2, 4), (2, 4), (3, 4)] and len(trials) == 4
    assert [each[2] > 0 for each in seen] == [False, False, True]


@pytest.mark.long
@pytest.mark.parametrize("law", ["fixed", "binomial"])
def test_a_log_tells_of_trials_only_where_they_are_public(law, begin, recipe, monkeypatch):
    more = {"runs": 2} if law == "fixed" else {"runs": 2, "mean": 2}
    search = begin(recipe(tune={"law": {"name": law, "mean": None, **more}}))
    monkeypatch.setattr(search, "stages", lambda: ["trial 0 training, step 1 of 4"])
    lines: list[str] = []
    monkeypatch.setattr(console, "log", lines.append)
    monkeypatch.setattr(
        search, "run", lambda place, show=None: show and search._report_progress(show)
    )
    with open_executor("local") as executor:
        pipeline.search_stage(search, executor)
    assert any("trial 0 training" in line for line in lines) == (law == "fixed"), lines
    assert any("0 of 2 trials" in line for line in lines) == (law == "fixed")
    if law != "fixed":
        assert not any(word in line for line in lines for word in ("0 of", "2 trials"))


def test_an_option_that_no_sweep_has_is_named(tmp_path):
    with pytest.raises(UserError, match=r"^sweep: changes: must be one of num_samples, "):
        pipeline.sweep(dict(SMALL), SPACE, folder=tmp_path / "own", changes={"model": "linear"})
    assert list(tmp_path.iterdir()) == []
