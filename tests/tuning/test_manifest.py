"""The manifest: everything drawn before the first trial, from secret keys, and only once."""

from __future__ import annotations

import json
import stat

import pytest

from dpdist.core.errors import UserError
from dpdist.runs.folder import RunFolder
from dpdist.tuning.manifest import (
    SearchFolder,
    Trial,
    best_trial,
    draw_trials,
    ensure_manifest,
    read_scores,
    read_settings,
    read_terms,
    read_trial_limit,
    read_trials,
    read_winner,
)

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
    assert stat.S_IMODE(folder.manifest.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_keys_and_values_do_not_depend_on_how_many_trials_there_are(recipe):
    few = draw_trials(
        recipe(tune={"num_trials": {"name": "fixed", "runs": 2, "mean": None}}).tune, KEY
    )
    many = draw_trials(
        recipe(tune={"num_trials": {"name": "fixed", "runs": 9, "mean": None}}).tune, KEY
    )
    assert many[:2] == few


def test_an_adaptive_searcher_gets_keys_but_no_values(recipe):
    num_trials = {"name": "fixed", "runs": 3, "mean": None}
    trials = draw_trials(recipe(tune={"num_trials": num_trials, "searcher": "optuna"}).tune, KEY)
    assert [trial.values for trial in trials] == [None] * 3


def test_the_best_is_the_highest_score_and_ties_ignore_the_data():
    trials = [Trial(n, KEY, tie) for n, tie in enumerate(("b", "c", "a"))]
    assert best_trial(trials, {0: 0.1, 1: 0.3, 2: 0.2}) == 1
    assert best_trial(trials, {0: 0.2, 2: 0.2}) == 0
    assert best_trial(trials, {2: 0.2, 0: 0.2, 1: 0.2}) == 1
    assert best_trial(trials, {2: -5.0}) == 2  # the others failed: minus infinity
    assert best_trial(trials, {}) is None
    assert best_trial([], {}) is None


TERMS = {
    "data": "d", "plan": {}, "trial": {}, "score_noise": None, "charge": "c", "assumed": [],
}  # fmt: skip
STATE = {"scores": [0.5], "done": True, "failed": None}


@pytest.mark.parametrize(
    ("name", "read", "good", "bad"),
    [
        ("terms.json", read_terms, TERMS, {"score_noise": "0.5"}),
        ("terms.json", read_terms, TERMS, {"charge": None}),
        ("terms.json", read_terms, TERMS, {"trial": [1]}),
        ("terms.json", read_terms, TERMS, {"assumed": "nothing"}),
        ("terms.json", read_trial_limit, None, {"trial": {"steps": 3}}),
        ("outcome.json", read_winner, {"winner": None}, {"winner": "1"}),
        ("settings/00003.json", lambda f: read_settings(f, 3),
         {"values": {}, "noise_multiplier": 1}, {"noise_multiplier": None}),
        ("scores/00003.json", lambda f: read_scores(f, 3), STATE, {"scores": ["high"]}),
        ("scores/00003.json", lambda f: read_scores(f, 3), STATE, {"scores": [True]}),
        ("scores/00003.json", lambda f: read_scores(f, 3), STATE, {"scores": []}),
        ("scores/00003.json", lambda f: read_scores(f, 3), STATE, {"done": "yes"}),
        ("scores/00003.json", lambda f: read_scores(f, 3), STATE, {"failed": 3}),
    ],
)  # fmt: skip
def test_a_damaged_file_of_a_search_is_one_clear_line(tmp_path, name, read, good, bad):
    folder = SearchFolder(RunFolder(tmp_path))
    path = folder.path / name
    path.parent.mkdir(parents=True)
    if good is not None:
        path.write_text(json.dumps(good))
        read(folder)
    path.write_text(json.dumps({**(good or TERMS), **bad}))
    with pytest.raises(UserError, match=rf"{name}.*: damaged: "):
        read(folder)
