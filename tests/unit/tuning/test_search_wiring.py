"""The wiring of a real search, its trials run in this process: whose keys, whose records, whose
noise, whose model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.key_recorder import NOISE, SAMPLING, KeyRecorder, record_keys
from support.searches import finish

from dpdist import models
from dpdist.core.errors import UserError
from dpdist.core.files import write_json
from dpdist.gradients.noise import standard_normal
from dpdist.privacy.budget import read_budgets
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianReleases
from dpdist.publishing import write_release
from dpdist.randomness.keys import derive_key
from dpdist.reports.html import write_report
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.tuning import manifest, scoring
from dpdist.tuning.manifest import read_scores, read_settings, read_trials
from dpdist.tuning.search import prepare_search
from dpdist.tuning.trial import prepare_trial, score_key, scoring_data

RUNS = 3
FIXED = {"run_key": "7f" * 32}
ASHA = {"num_trials": {"name": "fixed", "runs": RUNS, "mean": None}, "asha": {"rungs": 2}}


def searched(asked, begin, run_trials, patch) -> tuple[Any, KeyRecorder]:
    """A search from its first draw to its last score, with every key it used."""
    with patch.context() as inner:
        seen = record_keys(inner)
        search = begin(asked)
        run_trials(search)
    return search, seen


def of_trial(seen: KeyRecorder, keys: list[bytes], trial) -> list[bytes]:
    return [key for key in keys if trial.key in seen.ancestors(key)]


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [FIXED, {}], ids=["fixed-key", "secret-key"])
def test_every_trial_rung_and_purpose_has_a_key_of_its_own(
    recipe, begin, run_trials, monkeypatch, privacy
):
    asked = recipe(privacy=privacy, tune=ASHA)
    search, seen = searched(asked, begin, run_trials, monkeypatch)
    trials = read_trials(search.folder)
    steps = 4
    score_noise = [key for key in seen.keys_opened_by(NOISE) if "rung" in seen.labels(key)]
    train_noise = [key for key in seen.keys_opened_by(NOISE) if "rung" not in seen.labels(key)]
    # A score at each of two rungs of each trial, a noise and a sample for each step of each trial:
    # keys that were shared would be fewer.
    assert len(score_noise) == RUNS * 2
    assert len(train_noise) == len(seen.keys_opened_by(SAMPLING)) == RUNS * steps
    assert not set(train_noise) & set(seen.keys_opened_by(SAMPLING))
    for trial in trials:
        assert len(of_trial(seen, score_noise, trial)) == 2
        assert len(of_trial(seen, train_noise, trial)) in (0, steps)  # a run key read from a file
    # Each training descends from its own run key, and that from the trial's.
    run_keys = [search.folder.trial_folder(t.number).read_run_key() for t in trials]
    everything = {t.key for t in trials} | {bytes.fromhex("7f" * 32)}
    assert len(set(run_keys)) == RUNS and not set(run_keys) & everything
    for trial, key in zip(trials, run_keys, strict=True):
        assert trial.key in seen.ancestors(key), "the run key is not the trial's own"
        for of in (train_noise, seen.keys_opened_by(SAMPLING)):
            assert sum(key in seen.ancestors(one) for one in of) == steps
    # What draws K, values and ties serves nothing else, and no stream's key is a parent.
    assert not {s.key for s in seen.streams} & {d.parent for d in seen.derived}
    callers: dict[bytes, set[str]] = {}
    for stream in seen.streams:
        callers.setdefault(stream.key, set()).add(stream.caller)
    assert all(len(found) == 1 for found in callers.values())


@pytest.mark.slow
def test_each_score_carries_the_noise_that_was_paid_for(recipe, begin, run_trials, monkeypatch):
    """score = (right ones + std * normal) / records, with the accounted std, at every rung."""
    found = []
    real = scoring.add_noise

    def noted(total, key, std):
        found.append((float(total[0]), key, std))
        return real(total, key, std)

    monkeypatch.setattr(scoring, "add_noise", noted)
    search = begin(recipe(tune=ASHA))
    reports = [value for report in run_trials(search) for _, value in report]
    paid = search.cost.plan.phases[0].parts[1]
    assert paid == (GaussianReleases(search.cost.score_noise, RUNS * 2),)
    assert search.cost.score_noise > 0 and {std for _, _, std in found} == {search.cost.score_noise}
    records = scoring_data(search.recipe)
    for value, (right, key, std) in zip(reports, found, strict=True):
        noise = float(standard_normal(key, 0, 1)[0]) * std
        assert value * len(records) == pytest.approx(right + noise, abs=1e-4)
    # What the noise was added to is the count of the right ones: the last trial's model is there.
    model = models.load(search.folder.trial_folder(RUNS - 1).model_folder)
    right = int((model(records.batch(slice(None))).argmax(1) == records.targets(slice(None))).sum())
    assert found[-1][0] == right


@pytest.mark.slow
def test_every_trial_executes_its_own_settings(recipe, begin, run_trials):
    """Values, noise, steps and rate of each trial's plan are those on record for it."""
    space = {
        "training.learning_rate": {"log_uniform": [0.1, 1.0]},
        "privacy.clip_norm": {"choice": [0.5, 1.0, 2.0]},
    }
    search = begin(recipe(tune={**ASHA, "space": space}))
    run_trials(search)
    for trial in read_trials(search.folder):
        own = search.folder.trial_folder(trial.number)
        settings = read_settings(search.folder, trial.number)
        chosen, plan = own.read_recipe(), own.read_plan()
        assert settings["values"] == trial.values
        assert chosen.training.learning_rate == trial.values["training.learning_rate"]
        assert chosen.privacy.clip_norm == trial.values["privacy.clip_norm"]
        assert plan.step(0).noise_multiplier == settings["noise_multiplier"] == 4.0
        assert plan.clip_norm == pytest.approx(chosen.privacy.clip_norm, rel=0.05)
        assert plan.steps == 4 and own.require_trained()["steps"] == 4


@pytest.mark.slow
def test_the_winner_is_the_best_that_did_not_fail(recipe, begin, run_trials):
    """Its model, ledger, key, plan and recipe become the run's, and no other trial's."""
    search = begin(recipe(privacy=FIXED, tune=ASHA))
    run_trials(search)
    scores = [0.3, 0.9, 0.5]
    for number, value in enumerate(scores):
        state = {"scores": [0.99 - value, value], "done": True, "failed": None}
        write_json(search.folder.scores_file(number), state)
    best = search.folder.scores_file(1)
    write_json(best, {"scores": [0.1, 0.9], "done": True, "failed": "lost"})
    finish(search)
    run, winner = search.run_folder, search.folder.trial_folder(2)
    for name in ("plan.json", "ledger.jsonl", "run.key", "data.json", "fixed-key"):
        assert (run.private / name).read_bytes() == (winner.private / name).read_bytes(), name
        assert (run.private / name).stat().st_mode & 0o777 == 0o600, name
    ours, theirs = (load_file(f.model_folder / "model.safetensors") for f in (run, winner))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert run.read_recipe().training == winner.read_recipe().training
    assert Ledger.read(run.ledger).release_counts == dict.fromkeys(range(4), 1)
    assert load_results(run).has_fixed_key


@pytest.mark.slow
def test_what_is_public_does_not_change_with_the_number_of_trials(
    recipe, run_trials, tmp_path, monkeypatch
):
    """Two searches of different K with the same winner publish the same bytes."""
    published = []
    asked = recipe(
        name="run", privacy=FIXED, tune={"num_trials": {"name": "geometric", "mean": 3.0}}
    )
    for count in (1, 4):
        place = tmp_path / str(count)
        place.mkdir()
        monkeypatch.chdir(place)
        run = RunFolder(Path("run"))
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "draw_number_of_trials", lambda *given, count=count: count)
            search = prepare_search(asked, run, "r.yaml")
            assert len(read_trials(search.folder)) == count
            run_trials(search)
        for number in range(1, count):
            state = {"scores": [-1.0], "done": True, "failed": None}
            write_json(search.folder.scores_file(number), state)
        assert read_scores(search.folder, 0)["scores"][0] > -1
        finish(search)
        write_report(run)
        write_release(run, not_private=True)
        published.append(
            {
                str(path.relative_to(place)): path.read_bytes()
                for path in place.rglob("*")
                if path.is_file() and "private" not in path.parts
            }
        )
    assert published[0].keys() == published[1].keys() and len(published[0]) >= 8
    for name, content in published[0].items():
        assert content == published[1][name], f"{name} depends on the number of trials"


@pytest.mark.slow
def test_a_score_s_key_depends_on_all_that_is_scored(recipe, begin, run_trials):
    """To score the same again, after a crash, is the same noise; whatever else, another."""
    search = begin(recipe(tune=ASHA))
    run_trials(search)
    trial, other = read_trials(search.folder)[:2]
    job = prepare_trial(search.folder, search.recipe, trial)
    scored = scoring_data(search.recipe)

    def key(**more: Any) -> bytes:
        given = {
            "trial": trial, "rung": 1, "search_recipe": search.recipe, "job": job,
            "scoring_records": scored, "noise": 3.0,
        }  # fmt: skip
        return score_key(**(given | more))

    score = search.tune.score.model_copy(update={"samples": 7})
    tune = search.tune.model_copy(update={"score": score})
    scaled = job.recipe.training.model_copy(update={"learning_rate": 9.0})
    before = key()
    others = [
        key(rung=2),
        key(noise=0.1),
        key(scoring_records=job.records()),
        key(search_recipe=search.recipe.model_copy(update={"tune": tune})),
        key(job=replace(job, recipe=job.recipe.model_copy(update={"training": scaled}))),
        key(job=prepare_trial(search.folder, search.recipe, other)),
    ]
    assert key() == before and len({before, *others}) == 1 + len(others)
    model = job.folder.model_folder / "model.safetensors"
    theirs = search.folder.trial_folder(1).model_folder / model.name
    model.write_bytes(theirs.read_bytes())  # as another copy's nonces would have made it
    assert key() != before
    fixed = recipe(privacy=FIXED, tune=ASHA)
    assert key(search_recipe=fixed) == derive_key(trial.key, "rung", 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_trials", ["fixed", "geometric"])
def test_a_budget_knows_of_copies_of_a_search(recipe, begin, run_trials, tmp_path, num_trials):
    """Two with a fixed number of trials are paid for twice. With a secret one, which both would
    share, the copy is refused before its first trial."""
    budget = {"budget": str(tmp_path / "b"), "budget_ceiling": 40.0, "budget_composition": "filter"}
    number = {"runs": 2, "mean": None} if num_trials == "fixed" else {"mean": 2.0, "runs": None}
    asked = recipe(privacy=budget, tune={"num_trials": {"name": num_trials, **number}})
    search = begin(asked)
    search._charge_budget()
    other = RunFolder(tmp_path / "copy")
    shutil.copytree(search.run_folder.path, other.path)
    (before,) = read_budgets(tmp_path / "b")
    search._charge_budget()  # goes on after a crash
    assert read_budgets(tmp_path / "b")[0].spent == before.spent
    copy = prepare_search(asked, other, "r.yaml")
    if num_trials == "fixed":
        copy._charge_budget()
        for one in (search, copy):
            one._charge_budget(settle=True)
        assert read_budgets(tmp_path / "b")[0].spent == pytest.approx(2 * before.spent)
        return
    with pytest.raises(UserError, match="secret"):
        copy._charge_budget()
    search._charge_budget(settle=True)
    assert read_budgets(tmp_path / "b")[0].spent == before.spent
    with pytest.raises(UserError, match="secret"):
        copy._charge_budget()
