"""The wiring of a real search, its trials run in this process: whose keys, whose records, whose
noise, whose model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from searches import finish
from support.key_recorder import NOISE, SAMPLING, KeyRecorder, record_keys

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
from dpdist.training import worker
from dpdist.training.job import prepare as prepare_training
from dpdist.training.records import records_with_canaries
from dpdist.tuning import manifest, scoring
from dpdist.tuning.manifest import read_scores, read_trials
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
def test_certified_scores_use_draws_of_their_own(recipe, begin, run_trials, monkeypatch):
    """The smoothing noise of a score is fresh at every rung and trial, and for every record."""
    score = {"objectives": {"certified-accuracy": 1.0}, "radius": 0.02, "samples": 10,
             "private_eval_fraction": 0.02}  # fmt: skip
    asked = recipe(privacy=FIXED, tune={**ASHA, "score": score})
    search, seen = searched(asked, begin, run_trials, monkeypatch)
    units = [s for s in seen.streams if s.caller == "units"]
    records = len(scoring_data(search.recipe))
    counted = {s.key for s in units if not s.kind.startswith("check")}
    # Selecting and counting, for each record, at each rung of each trial; never the same noise.
    assert len(counted) == RUNS * 2 * records * 2
    selecting = {s.key for s in units if s.kind.startswith("select")}
    counting = {s.key for s in units if s.kind.startswith("estimate")}
    assert len(selecting) == len(counting) == RUNS * 2 * records and not selecting & counting


@pytest.mark.slow
def test_no_trial_trains_on_what_is_scored(recipe, begin, run_trials, tmp_path, monkeypatch):
    """By record: what each trial's training loop reads, and what its score reads, are disjoint and
    together all private records; the plan counts the first."""
    scored, trained = [], []
    real_score, real_run = scoring.compute_score, worker.run_training

    def score(folder, dataset, *args, **kwargs):
        scored.append(dataset.hashes)
        return real_score(folder, dataset, *args, **kwargs)

    def run(job, *args):
        trained.append((records_with_canaries(job.recipe, job.source).hashes, job.plan.records))
        return real_run(job, *args)

    monkeypatch.setattr(scoring, "compute_score", score)
    monkeypatch.setattr(worker, "run_training", run)
    asked = recipe(data={"max_train": 600}, tune={**ASHA, "score": {"private_eval_fraction": 0.2}})
    _, seen = searched(asked, begin, run_trials, monkeypatch)
    assert len(scored) == len(trained) == RUNS * 2
    small = recipe(data={"max_train": 600})
    whole = prepare_training(small, RunFolder(tmp_path / "whole"), "r.yaml")
    everything = records_with_canaries(whole.recipe, whole.source).hashes
    for held, (own, records) in zip(scored, trained, strict=True):
        assert len(held) and not np.isin(held, own).any()
        assert sorted([*held, *own]) == sorted(everything)
        assert records == len(own)
    # The loop drew among these records and no others.
    assert {s.start + s.count for s in seen.streams if s.caller == SAMPLING} == {len(trained[0][0])}


@pytest.mark.slow
def test_each_score_carries_the_noise_that_was_paid_for(recipe, begin, run_trials, monkeypatch):
    """score = (right ones + std * normal) / records, with the accounted std, at every rung."""
    found = []
    real = scoring.add_noise

    def noted(total, key, std):
        found.append((float(total[0]), key, std))
        return real(total, key, std)

    monkeypatch.setattr(scoring, "add_noise", noted)
    asked = recipe(tune=ASHA)
    search = begin(asked)
    reports = [value for report in run_trials(search) for _, value in report]
    paid = [p for p in _phases(search.cost.plan.phases) if isinstance(p, GaussianReleases)]
    assert paid and {p.noise_multiplier for p in paid} == {search.cost.score_noise}
    assert sum(p.count for p in paid) == RUNS * 2, "every rung of every trial is paid for"
    assert search.cost.score_noise > 0 and {std for _, _, std in found} == {search.cost.score_noise}
    records = scoring_data(asked)
    for value, (right, key, std) in zip(reports, found, strict=True):
        noise = float(standard_normal(key, 0, 1)[0]) * std
        assert value * len(records) == pytest.approx(right + noise, abs=1e-4)
    # What the noise was added to is the count of the right ones: the last trial's model is there.
    model = models.load(search.folder.trial_folder(RUNS - 1).model_folder)
    right = int((model(records.batch(slice(None))).argmax(1) == records.targets(slice(None))).sum())
    assert found[-1][0] == right


def _phases(phases):
    """All leaves of nested phases."""
    for phase in phases:
        groups = [*getattr(phase, "choices", ()), *getattr(phase, "parts", ())]
        inner = [*getattr(phase, "phases", ()), *(one for group in groups for one in group)]
        yield from _phases(inner) if inner else [phase]


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
        settings = json.loads(search.folder.settings_file(trial.number).read_text())
        chosen = own.read_recipe()
        assert settings["values"] == trial.values
        assert chosen.training.learning_rate == trial.values["training.learning_rate"]
        assert chosen.privacy.clip_norm == trial.values["privacy.clip_norm"]
        plan = prepare_training(chosen, own, "r.yaml").plan
        assert plan.step(0).noise_multiplier == settings["noise_multiplier"] == 4.0
        assert plan.clip_norm == pytest.approx(trial.values["privacy.clip_norm"], rel=0.05)
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
    num_trials = {"name": "geometric", "mean": 3.0}
    for count in (1, 4):
        with monkeypatch.context() as patch:
            patch.setattr(
                manifest, "draw_number_of_trials", lambda num_trials, key, count=count: count
            )
            folder = RunFolder(tmp_path / str(count) / "run")
            folder.path.parent.mkdir()
            asked = recipe(name="run", privacy=FIXED, tune={"num_trials": num_trials})
            search = prepare_search(asked, folder, "r.yaml")
            assert len(read_trials(search.folder)) == count
            run_trials(search)
        for number in range(1, count):
            state = {"scores": [-1.0], "done": True, "failed": None}
            write_json(search.folder.scores_file(number), state)
        assert read_scores(search.folder, 0)["scores"][0] > -1
        finish(search)
        monkeypatch.chdir(folder.path.parent)
        run = RunFolder(folder.path.relative_to(folder.path.parent))
        write_report(run)
        write_release(run, not_private=True)
        files = {
            str(p.relative_to(folder.path)): p.read_bytes()
            for p in folder.path.rglob("*")
            if p.is_file() and "private" not in p.parts
        }
        published.append(files)
    assert published[0].keys() == published[1].keys() and len(published[0]) >= 8
    for name, content in published[0].items():
        assert content == published[1][name], f"{name} depends on the number of trials"


def test_the_count_is_drawn_with_a_key_of_its_own(recipe, monkeypatch):
    """K, values and ties of trials come from different streams of the secret key."""
    key = bytes(range(32))
    with monkeypatch.context() as patch:
        seen = record_keys(patch)
        trials = manifest.draw_trials(recipe().tune, key)
    assert len({t.key for t in trials} | {bytes.fromhex(t.tie_breaker) for t in trials}) == 2 * len(
        trials
    )
    streams = {s.key for s in seen.streams}
    assert len(streams) == 1 + len(trials)
    assert not streams & {t.key for t in trials}
    other = manifest.draw_trials(recipe().tune, derive_key(key, "another"))
    assert not {t.key for t in other} & {t.key for t in trials}


@pytest.mark.slow
def test_copies_of_a_search_share_no_noise(recipe, begin, run_trials, tmp_path, monkeypatch):
    """Neither of a step nor of a score: the same trial has another model in each. The same noise on
    both counts of held-out records would be none on their difference."""
    asked = recipe(tune=ASHA)
    search = begin(asked)
    other = tmp_path / "copy"
    shutil.copytree(search.run_folder.path, other)
    noise = []
    for one in (search, prepare_search(asked, RunFolder(other), "r.yaml")):
        with monkeypatch.context() as patch:
            seen = record_keys(patch)
            run_trials(one)
        noise.append(set(seen.keys_opened_by(NOISE)))
        assert sum("rung" in seen.labels(key) for key in noise[-1]) == RUNS * 2
    assert not noise[0] & noise[1]


def test_another_model_s_score_has_another_key(recipe, begin, run_trials):
    """As another copy's nonces make one: the same noise on both counts would be none between."""
    search = begin(recipe())
    run_trials(search, [])
    trial = read_trials(search.folder)[0]
    job, scored = prepare_trial(search.folder, search.recipe, trial), scoring_data(search.recipe)
    spec, found = models.ModelSpec("linear", scored.input_shape, scored.classes), []
    for seed in (1, 2, 1):
        models.save(models.initialize(spec, seed), spec, job.folder.model_folder)
        found.append(score_key(trial, 1, search.recipe, job, scored, 3.0))
    assert found[0] == found[2] != found[1]


@pytest.mark.slow
def test_a_score_s_key_depends_on_all_that_is_scored(recipe, begin, run_trials):
    """To score the same again, after a crash, is the same noise; whatever else, another."""
    search = begin(recipe(tune=ASHA))
    run_trials(search)
    trial = read_trials(search.folder)[0]
    job = prepare_trial(search.folder, search.recipe, trial)
    scored = scoring_data(search.recipe)

    def key(**more: Any) -> bytes:
        given = {
            "trial": trial, "rung": 1, "search_recipe": search.recipe, "job": job,
            "scoring_records": scored,
            "noise": 3.0,
        }  # fmt: skip
        return score_key(**(given | more))

    assert key() == key()
    tune = search.tune.model_copy(
        update={"score": search.tune.score.model_copy(update={"samples": 7})}
    )
    scaled = job.recipe.training.model_copy(update={"learning_rate": 9.0})
    others = [
        key(rung=2),
        key(noise=0.1),
        key(scoring_records=job.records()),
        key(search_recipe=search.recipe.model_copy(update={"tune": tune})),
        key(job=replace(job, recipe=job.recipe.model_copy(update={"training": scaled}))),
        key(job=prepare_trial(search.folder, search.recipe, read_trials(search.folder)[1])),
    ]
    assert len({key(), *others}) == 1 + len(others)
    before, model = key(), job.folder.model_folder / "model.safetensors"
    other = search.folder.trial_folder(1).model_folder / model.name
    model.write_bytes(other.read_bytes())  # as another copy's nonces would have made it
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
