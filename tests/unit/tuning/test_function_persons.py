"""A search over a function as over a recipe: persons, budgets, several workers, any optimizer."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.own_loops import begin as own_loop
from support.own_loops import rows
from support.processes import kill, wait_for
from support.searches import check, finish, load, run_trial
from torch import nn

import dpdist
from dpdist import PrivateTraining, UserError, searching
from dpdist.privacy.budget import read_budgets
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianReleases, GaussianSteps, ParallelParts
from dpdist.runs.folder import RunFolder
from dpdist.tuning.manifest import SearchFolder, read_scores, read_settings, read_terms, read_trials

pytestmark = pytest.mark.filterwarnings("ignore:.*run_key")

ROOT = Path(__file__).resolve().parents[3]
WIDTH, PATIENTS, MOST = 4, 30, 2
LAW = {"name": "fixed", "runs": 2}
SPACE = {"lr": {"log_uniform": [0.05, 1.0]}}
PERSONS = {
    "noise_multiplier": 4.0, "delta": 1e-3, "unit": "user", "max_records_per_user": MOST,
}  # fmt: skip


def visits(count: int, seed: int, first: int = 0) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Records of patients, of which each has 1 to 5, in no order."""
    rng = np.random.default_rng(seed)
    owner = rng.permutation(np.repeat(np.arange(count), rng.integers(1, 6, count)))
    inputs = rng.random((len(owner), WIDTH), np.float32)
    return inputs, (inputs.sum(1) > WIDTH / 2).astype(np.int64), [f"p{first + o}" for o in owner]


def as_records(given: tuple[np.ndarray, np.ndarray, list[str]]) -> dpdist.Records:
    inputs, labels, units = given
    return dpdist.as_records((torch.tensor(inputs), torch.tensor(labels)), unit=units)


TRAINED, SCORED = visits(PATIENTS, 1), visits(12, 2, first=100)


def build(config: Any) -> PrivateTraining:
    return own_loop(
        config.folder, nn.Linear(WIDTH, 2), rate=config["lr"], data=config.data,
        privacy=config.privacy, batch_size=10, steps=3,
    )  # fmt: skip


def begin(folder: Path, train: Any = build, **given: Any) -> searching.FunctionSearch:
    score = {"private_eval_data": as_records(SCORED), "noise": 2.0}
    options = {
        "space": SPACE, "data": as_records(TRAINED), "score": score, "privacy": PERSONS,
        "num_trials": LAW, **given,
    }  # fmt: skip
    search = check(train, folder, **options)
    search.begin()
    return search


@pytest.mark.slow
def test_persons_are_counted_sampled_scored_and_stated(tmp_path, coarse_grid):
    search = begin(tmp_path / "own")
    plan = search.cost.plan
    assert plan.records == PATIENTS and plan.user is not None
    assert plan.user.max_records == MOST and plan.counted == "users"
    steps, scores = GaussianSteps(2 * 3, 4.0, 10 / PATIENTS, None), GaussianReleases(2.0, 2)
    assert plan.phases == (ParallelParts(((steps,), (scores,))),)
    assert "the number of held-out users (12) is public" in read_terms(search.folder)["assumed"]
    for number in range(2):
        (score,) = run_trial(search, number)["scores"]
        own = search.folder.trial_folder(number)
        assert own.read_plan().records == PATIENTS
        # The noisy sum of the persons' means, worked out from the noise of two standard deviations.
        model = load(own.model_folder)
        right = (model(torch.tensor(SCORED[0])).argmax(1).numpy() == SCORED[1]).astype(float)
        units = np.array(SCORED[2])
        exact = sum(right[units == unit].mean() for unit in set(SCORED[2]))
        assert abs(score * 12 - exact) < 2.0 * 5
    run = finish(search)
    facts = dpdist.load_results(run)
    assert facts.guarantee == search.cost.guarantee and facts.guarantee.kind == "proved"
    assert "user" in str(facts.guarantee)


def shared(given: tuple[np.ndarray, np.ndarray, list[str]]) -> dpdist.Records:
    return as_records((given[0], given[1], ["p3", *given[2][1:]]))


REFUSED = [
    ({"score": {"private_eval_data": shared(SCORED)}}, "score: "),
    ({"score": {"public": shared(SCORED)}}, "unit with data"),
    ({"score": {"private_eval_data": SCORED[:2]}}, "score: .*unit="),
    ({"data": TRAINED[:2]}, "data: .*unit="),
    ({"privacy": {**PERSONS, "budget": "b"}}, "budget"),
]


@pytest.mark.parametrize(("given", "key"), REFUSED, ids=[key for _, key in REFUSED])
def test_persons_on_both_sides_or_of_nobody_are_refused(tmp_path, coarse_grid, given, key):
    with pytest.raises(UserError, match=key):
        begin(tmp_path / "own", **given)
    assert not (tmp_path / "own").exists()


@pytest.mark.slow
def test_a_search_is_charged_once_to_the_budget_of_all_its_records(tmp_path, coarse_grid):
    """Trained and scored records pay for the whole search; none of its trials does besides."""
    budget = tmp_path / "budget"
    privacy = {"noise_multiplier": 4.0, "delta": 1e-3, "budget": str(budget)}
    score = {"private_eval_data": rows(20, 2, WIDTH)}
    given = {"privacy": privacy, "data": rows(60, 1, WIDTH), "score": score}
    search = begin(tmp_path / "own", **given)
    search._charge_budget()
    (known,) = read_budgets(budget)
    before = known.find_charge(search._charge_id())
    assert before is not None and len(known.charges) == 1
    for number in range(2):
        assert run_trial(search, number)["failed"] is None
    run = finish(search)
    (after,) = read_budgets(budget)
    assert len(after.charges) == 1
    assert run.read_recipe().privacy.budget == budget.resolve()
    # The scored records are on it as well: a search that trains on them does not fit any more.
    ceiling = {**privacy, "budget_ceiling": search.cost.guarantee.epsilon * 1.01}
    other = check(
        build, tmp_path / "other", space=SPACE, data=rows(20, 2, WIDTH), num_trials=LAW,
        score={"public": rows(20, 9, WIDTH)}, privacy=ceiling,
    )  # fmt: skip
    with pytest.raises(UserError, match=r"privacy\.budget"):
        other.check_budget("tune")
    assert not (tmp_path / "other").exists()


SCRIPT = """
import json, os, sys, time

import torch
import dpdist

generator = torch.Generator().manual_seed(1)
inputs = torch.rand(160, 4, generator=generator)
labels = (inputs.sum(1) > 2).long()
owner = [f"p{row // 2}" for row in range(160)]
seen = []


class Slow(torch.optim.Adam):
    def step(self, closure=None):
        time.sleep(float(os.environ.get("SLOW", "0")))
        super().step()


def part(rows):
    return dpdist.as_records((inputs[rows], labels[rows]), unit=owner[rows])


def train(config):
    seen.append(1)
    print("seen", len(seen), "in", os.getpid(), "input", sys.stdin.read())
    if config.folder.parent.name == "trials" and config.folder.name == os.environ.get("DIES"):
        os.kill(os.getpid(), 9)
    model = torch.nn.Linear(4, 2)
    return dpdist.PrivateTraining(
        model, Slow(model.parameters(), lr=config["lr"]), config.data, loss="cross-entropy",
        privacy=config.privacy, batch_size=20, steps=12, folder=config.folder,
        resources={"checkpoint_seconds": 1e-6}, reproducible=True,
    )


if __name__ == "__main__":
    search = dpdist.tune(
        train, {"lr": {"log_uniform": [0.01, 1.0]}}, data=part(slice(120)),
        num_trials={"name": "fixed", "runs": 2},
        score={"private_eval_data": part(slice(120, 160)), "value": dpdist.brier_score(), "noise":
        1.0}, privacy=dict(
            noise_multiplier=4.0, delta=1e-3, run_key="7f" * 32, unit="user",
            max_records_per_user=2,
        ),
        folder=sys.argv[1], executor="local", resources={"max_failures": 1},
    )
    told = [dict(values=t.values, scores=t.scores, chosen=t.chosen) for t in search.trials]
    print("RESULT", json.dumps([told, search.config, search.guarantee.epsilon]))
"""


def script(folder: Path, name: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "search.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, "search.py", name], cwd=folder,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def result_of(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate()
    assert process.returncode == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("RESULT ")]
    assert "seen" not in out + err, "a trial's print left private/"
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_killed_search_per_person_goes_on_to_the_same_winner(tmp_path):
    """kill -9 of the driver, with which its workers end; it ends as one that nobody killed."""
    whole = result_of(script(tmp_path, "whole"))
    process = script(tmp_path, "killed", SLOW="0.3")
    search = SearchFolder(RunFolder(tmp_path / "killed"))
    ledger = search.trial_folder(0).ledger
    wait_for(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") > 3, process=process)
    kill(process)
    assert result_of(script(tmp_path, "killed")) == whole
    for trial in read_trials(search):
        ledger = Ledger.read(search.trial_folder(trial.number).ledger)
        assert ledger.release_counts == dict.fromkeys(range(12), 1)
        # Each attempt saw the script as it was before the first call, in a process of its own.
        log = (search.path / "logs" / f"{trial.number:05d}.txt").read_text()
        assert set(re.findall(r"seen (\d) in \d+ input (.*)", log)) == {("1", "")}
    assert not (search.path / "function.pickle").exists()
    assert stat.S_IMODE(search.path.stat().st_mode) == 0o700


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_a_killed_worker_is_a_failed_trial(tmp_path):
    """Killed whenever it begins: the trial has failed, and the search goes on to the others."""
    result_of(script(tmp_path, "own", DIES="00000"))
    folder = SearchFolder(RunFolder(tmp_path / "own"))
    assert read_scores(folder, 0)["failed"] == "its workers were lost again and again"
    assert read_scores(folder, 1)["failed"] is None
    assert not folder.trial_folder(0).ledger.exists()
    assert read_settings(folder, 1)["values"] == dpdist.SearchResult(folder.run).config
