"""`dpdist.tune` over a function: the price of a recipe's search, and nothing that goes round it."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.own_loops import WIDTH, Rows, rows
from support.own_loops import begin as own_loop
from support.searches import check, finish, load, run_trial
from torch import nn

import dpdist
from dpdist import PrivateTraining, UserError, searching
from dpdist import searched_function as built
from dpdist.core.files import read_json
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianReleases, GaussianSteps, ParallelParts, RepeatAndSelect
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key, stream_words
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.script_checks import HashedRecords
from dpdist.training.trained_weights import mark_trained
from dpdist.tuning.manifest import (
    SearchFolder,
    read_scores,
    read_settings,
    read_terms,
    read_trials,
)
from dpdist.tuning.space import RecordCounts, SearchCost

pytestmark = pytest.mark.filterwarnings("ignore:.*run_key")

RECORDS, EVAL_DATA = 120, 40
FIXED, POISSON = {"name": "fixed", "runs": 3}, {"name": "poisson", "mean": 3.0}
PRIVATE = {"noise_multiplier": 4.0, "delta": 1e-3}
SPACE = {"lr": {"log_uniform": [0.05, 2.0]}}


TRAINED, SCORED = rows(RECORDS, 1), rows(EVAL_DATA, 2)


def build(config: Any, *, model: nn.Module | None = None, **given: Any) -> PrivateTraining:
    options = {
        "data": config.data, "privacy": config.privacy, "batch_size": config.get("batch", 20),
        "steps": config.get("steps", 4), "rate": config.get("lr", 0.1), **given,
    }  # fmt: skip
    return own_loop(config.folder, model or nn.Linear(WIDTH, 2), **options)


def prepare(folder: Path, train: Any = build, **given: Any) -> searching.FunctionSearch:
    """On public records unless told otherwise."""
    options = {
        "space": SPACE, "data": TRAINED, "num_trials": FIXED, "score": {"public": SCORED},
        "privacy": PRIVATE, **given,
    }  # fmt: skip
    return check(train, folder, **options)


def begin(folder: Path, train: Any = build, **given: Any) -> searching.FunctionSearch:
    search = prepare(folder, train, **given)
    search.begin()
    return search


def test_rates_by_class_are_those_of_every_trial(tmp_path, coarse_grid):
    """A search is priced by the rates of one trial, so another one may not have larger ones."""
    ones = int(TRAINED[1].sum())

    def rare(config: Any) -> PrivateTraining:
        counts = {0: RECORDS - ones, 1: ones}
        return build(config, class_sampling={0: config.get("more", 2), 1: 1}, class_counts=counts)

    priced = prepare(tmp_path / "one", rare).cost.plan
    assert priced.guarantee().epsilon > prepare(tmp_path / "none").cost.plan.guarantee().epsilon
    with pytest.raises(UserError, match="class_counts"):
        prepare(tmp_path / "two", rare, space={**SPACE, "more": {"choice": [2, 4]}})


@pytest.fixture
def recipe_s_cost(recipe):
    """The cost of a recipe's search with the same mechanism."""

    def cost(num_trials: Any, score: Any = None, privacy: Any = PRIVATE, space: Any = SPACE) -> Any:
        names = {"lr": "learning_rate", "batch": "batch_size", "steps": "steps"}
        own = recipe(privacy={"noise_multiplier": None, **privacy}, training={"batch_size": 20})
        raw = own.model_dump(mode="json", exclude_none=True)
        raw["tune"] = {
            "space": {f"training.{names[key]}": domain for key, domain in space.items()},
            "num_trials": num_trials,
            "score": {"public": {"name": "digits"}} if score is None else score,
        }
        own = parse_recipe(raw, "r.yaml")
        counts = RecordCounts(RECORDS, 0.0, lambda fraction: RECORDS)
        return SearchCost(own, counts, own.tune.num_trials)

    return cost


def test_values_and_targets_are_priced_as_the_recipe_s(tmp_path, coarse_grid, recipe_s_cost):
    # The dearest combination is none of the ends.
    space = {"batch": {"choice": [20, 40, 30]}, "steps": {"choice": [4, 8, 6]}}
    search = prepare(tmp_path / "own", space=space, num_trials=POISSON)
    other = recipe_s_cost(POISSON, space=space)
    assert search.cost.plan == other.plan and search.cost.guarantee == other.guarantee
    dearest = search.plan_trial({"batch": 40, "steps": 8})[1]
    assert dearest.phases == (GaussianSteps(8, 4.0, 40 / RECORDS, None),)
    with pytest.raises(UserError, match=r"space\.batch"):
        prepare(tmp_path / "b", space={"batch": {"integer": [20, 40]}})

    privacy = {"epsilon": 3.0, "delta": 1e-3}
    search = prepare(tmp_path / "own", privacy=privacy, num_trials=POISSON)
    noise = recipe_s_cost(POISSON, privacy=privacy).noise_multiplier
    assert search.cost.noise_multiplier == noise
    assert 2.9 < search.cost.guarantee.epsilon <= 3.0
    assert search.plan_trial({"lr": 0.5})[1].phases == (
        GaussianSteps(4, noise, 20 / RECORDS, None),
    )


def test_the_plan_is_the_one_of_the_theorem(tmp_path, coarse_grid):
    score = {"private_eval_data": SCORED, "noise": 5.0}
    search = prepare(tmp_path / "own", num_trials=POISSON, score=score)
    steps = GaussianSteps(4, 4.0, 20 / RECORDS, None)
    both = ParallelParts(((steps,), (GaussianReleases(5.0, 1),)))
    wanted = PrivacyPlan(RECORDS, (RepeatAndSelect((both,), 3.0, math.inf),), 1e-3, clip_norm=1.0)
    assert search.cost.plan == wanted


CALLS: list[int] = []


def counting(config: Any) -> PrivateTraining:
    CALLS.append(1)
    model = nn.Linear(WIDTH, 2)
    with torch.no_grad():
        model.bias += 0.1 * len(CALLS)
    return build(config, model=model)


def stepped(config: Any) -> PrivateTraining:
    training = build(config)
    training.step()
    return training


def scored_itself(config: Any) -> PrivateTraining:
    training = build(config)
    training.score(SCORED, every=2, noise=3.0)
    return training


def changed_records(config: Any) -> PrivateTraining:
    """Scaled in place by the largest private value, which is the same again the second time."""
    inputs = config.data.arrays[0]
    inputs.div_(inputs.max())
    return build(config)


def with_privacy(**other: Any) -> Any:
    return lambda config: build(config, privacy=config.privacy.model_copy(update=other))


OWNED = dpdist.as_records(TRAINED, unit=[f"person {each}" for each in range(RECORDS)])
SAME_OWNER = dpdist.as_records(SCORED, unit=["person 7"] * EVAL_DATA)


TRAINED_MODEL = nn.Linear(WIDTH, 2)
mark_trained(TRAINED_MODEL, Path("earlier"))


REFUSED = [
    (counting, {}, "train"),
    (stepped, {}, "train"),
    (scored_itself, {}, "train: score"),
    (with_privacy(delta=1e-4), {}, "privacy.delta"),
    (with_privacy(noise_multiplier=0.5), {"privacy": {"epsilon": 3.0, "delta": 1e-3}},
     "privacy.noise_multiplier"),
    (with_privacy(run_key="7f" * 32), {}, "privacy.run_key"),
    (lambda config: build(config, data=rows(RECORDS, 9)), {}, "train: data"),
    (changed_records, {"data": Rows(rows(RECORDS, 3))}, "train"),
    (build, {"data": OWNED, "score": {"private_eval_data": SAME_OWNER}}, "privacy.unit"),
    (lambda config: build(config, model=copy.deepcopy(TRAINED_MODEL)), {}, "began_with"),
    (build, {"score": {"private_eval_data": SCORED, "value": lambda *_: torch.ones(1) * 7}},
     "score.value"),
    (build, {"score": {"private_eval_data": SCORED, "value": lambda model, batch: torch.rand(1)}},
     "score.value"),
    (build, {"score": {"private_eval_data": TRAINED}}, "score: "),
    (build, {"score": {"public": TRAINED}}, "score.public"),
    (build, {"score": {"public": SCORED[0]}}, "score.value"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("train", "given", "key"), REFUSED)
def test_refusals_leave_nothing(tmp_path, coarse_grid, train, given, key):
    CALLS.clear()
    options = {
        "space": SPACE, "data": TRAINED, "num_trials": FIXED, "score": {"public": SCORED},
        "privacy": PRIVATE, **given,
    }  # fmt: skip
    with pytest.raises(UserError, match=key):
        dpdist.tune(train, folder=tmp_path / "own", executor="local", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["private_eval_data", "public"])
def test_scored_records_are_apart_and_pay_if_they_are_private(tmp_path, coarse_grid, key):
    more = {"noise": 3.0} if key == "private_eval_data" else {}
    search = prepare(tmp_path / "own", score={key: SCORED, **more})
    private = [TRAINED, SCORED] if key == "private_eval_data" else [TRAINED]
    paying = [HashedRecords(dpdist.as_records(each)).hashes for each in private]
    assert np.array_equal(search.budget_records().hashes, np.concatenate(paying))
    with pytest.raises(UserError):
        prepare(tmp_path / "own", score={key: (TRAINED[0][:5], TRAINED[1][:5]), **more})


def test_the_text_of_an_error_is_not_among_what_is_shown_of_trials(tmp_path, coarse_grid):
    search = begin(tmp_path / "own")
    for trial, failed in zip(read_trials(search.folder), ("record 17", None, None), strict=True):
        settings = {"values": trial.values, "noise_multiplier": 4.0}
        searching.write_json(search.folder.settings_file(trial.number), settings)
        state = {"scores": [0.5], "done": True, "failed": failed}
        searching.write_json(search.folder.scores_file(trial.number), state)
    told = search._trial_rows(1)
    assert [bool(row["failed"]) for row in told] == [True, False, False]
    assert "17" not in told[0]["failed"]


@pytest.mark.slow
def test_the_score_is_the_noisy_sum_worked_out_by_hand(tmp_path, coarse_grid):
    """With the keys of the search; another trial, another model and another sum: another noise."""
    search = begin(
        tmp_path / "own", score={"private_eval_data": SCORED, "noise": 3.0}, num_trials=FIXED
    )
    seen = set()
    for number in range(3):
        (score,) = run_trial(search, number)["scores"]
        trial, own = read_trials(search.folder)[number], search.folder.trial_folder(number)
        weights = load(own.model_folder)
        outputs = SCORED[0].double() @ weights.weight.double().T + weights.bias.double()
        total = float((outputs.argmax(1) == SCORED[1]).sum())
        own_key = derive_key(trial.key, "score of a function")
        records = search._explorer.function.fingerprint(derive_key(own_key, "fingerprint"))
        made_of = [built.models.model_hash(own.model_folder), records, total.hex(), 3.0]
        key = derive_key(own_key, "noise", json.dumps(made_of))
        uniform, turn = stream_words(key, 0, 2).tolist()
        length = math.sqrt(-2 * math.log(2.0**-64 + uniform * 2.0**-64))
        normal = length * math.cos(2 * math.pi * (turn >> 11) * 2.0**-53)
        assert own.read_run_key() == derive_key(trial.key, "run key")
        assert score * EVAL_DATA == pytest.approx(total + 3.0 * normal, abs=1e-5)
        seen.add(normal)
    assert len(seen) == 3


@pytest.mark.slow
def test_a_trial_trains_on_its_own_key_and_is_what_was_accounted(tmp_path, coarse_grid):
    search = begin(tmp_path / "own", privacy={**PRIVATE, "run_key": "7f" * 32})
    keys = set()
    for number in range(3):
        assert run_trial(search, number)["failed"] is None
        own = search.folder.trial_folder(number)
        keys.add(own.run_key.read_text())
        assert own.read_plan().phases == (GaussianSteps(4, 4.0, 20 / RECORDS, None),)
        assert Ledger.read(own.ledger).release_counts == dict.fromkeys(range(4), 1)
    assert len(keys) == 3
    run = finish(search)
    facts = dpdist.load_results(run)
    assert facts.guarantee == search.cost.guarantee
    assert set(searching.ASSUMED) < set(facts.privacy_card()["assumptions"])
    result = dpdist.SearchResult(run)
    best = max(result.trials, key=lambda trial: trial.scores[-1])
    assert best.chosen and result.config == best.values
    assert "NOT PRIVATE" in str(result.guarantee)  # a key that others know
    settings = [read_settings(search.folder, number)["values"] for number in range(3)]
    assert [trial.values for trial in result.trials] == settings
    search.make_loadable()
    assert load(run.model_folder).weight.shape == (2, WIDTH)


@pytest.mark.slow
def test_no_training_states_or_goes_on_with_a_part_of_a_search(tmp_path, coarse_grid):
    """The winner's folder or a trial's, opened by the script: epsilon would be one training's.

    Nor is the ended search the answer to another one's question."""
    fixed = {"name": "fixed", "runs": 1}
    search = begin(tmp_path / "own", num_trials=fixed)
    run_trial(search, 0)
    run = finish(search)
    for folder in (run.path, search.folder.trial_folder(0).path):
        config = searching.TrialConfig(
            read_settings(search.folder, 0)["values"], searching.as_records(TRAINED),
            dpdist.Privacy(**PRIVATE), folder,
        )  # fmt: skip
        with pytest.raises(UserError, match="folder"):
            build(config)
    assert prepare(run.path, num_trials=fixed).run_folder == run
    with pytest.raises(UserError, match="private records"):
        prepare(run.path, num_trials=fixed, data=rows(RECORDS, 8))


@pytest.mark.slow
def test_an_adaptive_searcher_sees_scores_that_were_paid_for(tmp_path, coarse_grid):
    pytest.importorskip("optuna")
    from dpdist.tuning.searchers import ManifestSearcher
    from dpdist.tuning.trial import _make_suggester

    score = {"private_eval_data": SCORED, "noise": 3.0}
    search = begin(tmp_path / "own", score=score, searcher="optuna")
    trials = read_trials(search.folder)
    assert [trial.values for trial in trials] == [None] * 3
    assert search.cost.plan == prepare(tmp_path / "other", score=score).cost.plan
    suggester = _make_suggester(search.folder, search.tune)
    searcher = ManifestSearcher(search.folder, trials, search.trial_noise_multiplier, suggester)
    for number in range(3):
        assert searcher.suggest(f"id-{number}") == {"trial": number}
        assert run_trial(search, number)["failed"] is None
        searcher.on_trial_complete(f"id-{number}")
    assert len(dpdist.SearchResult(finish(search)).trials) == 3


def test_a_secret_law_shows_the_winner_alone(tmp_path, coarse_grid):
    num_trials = {"name": "negative-binomial", "shape": 1000.0, "mean": 2.0}
    search = begin(tmp_path / "own", num_trials=num_trials)
    count = len(read_trials(search.folder))
    for number in range(count):
        run_trial(search, number)
    run = finish(search)
    result = dpdist.SearchResult(run)
    with pytest.raises(UserError, match="trials"):
        _ = result.trials
    assert not run.trials.exists() and "trials" not in read_json(run.search_record)
    assumed = dpdist.load_results(run).privacy_card()["assumptions"]
    assert {*searching.ASSUMED, searching.ASSUMED_PUBLIC} <= set(assumed)
    public = "".join(
        path.read_text() for path in run.path.rglob("*")
        if path.is_file() and run.private not in path.parents
    )  # fmt: skip
    for trial in read_trials(search.folder):
        assert repr(trial.values["lr"]) not in public


def test_other_records_than_those_of_the_search_make_a_trial_fail(tmp_path, coarse_grid):
    search = begin(tmp_path / "own")
    known = search._explorer.function
    others = {"records": rows(RECORDS, 9), "scored": rows(EVAL_DATA, 9)}
    for number, (name, data) in enumerate(others.items()):
        other = {name: dpdist.as_records(data)}
        search._explorer.function = dataclasses.replace(known, **other)
        assert "data" in run_trial(search, number)["failed"]


@pytest.mark.slow
def test_an_error_counts_as_the_worst_and_its_text_stays_private(tmp_path, coarse_grid):
    """A failed trial is not tried again."""
    calls = []

    class Raising(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            calls.append(1)
            raise KeyError("record 17")

    def train(config: Any) -> PrivateTraining:
        model = nn.Linear(WIDTH, 2)
        kind = Raising if config["kind"] == "step" else torch.optim.SGD
        return build(config, model=model, optimizer=kind(model.parameters(), lr=0.1))

    given = {"space": {"kind": {"choice": ["fine", "step"]}}, "num_trials": {**FIXED, "runs": 8}}
    for attempt in range(6):  # a key whose 8 draws are of one kind comes once in 128
        search = begin(tmp_path / f"own{attempt}", train, **given)
        kinds = [trial.values["kind"] for trial in read_trials(search.folder)]
        if len(set(kinds)) == 2:
            break
    states = [run_trial(search, number) for number in range(8)]
    for kind, state in zip(kinds, states, strict=True):
        assert state["done"] and (state["failed"] is None) == (kind == "fine")
    failed = kinds.index("step")
    assert run_trial(search, failed) == states[failed] and len(calls) == kinds.count("step")
    run = finish(search)
    assert dpdist.SearchResult(run).config == {"kind": "fine"}
    assert "record 17" in states[failed]["failed"]
    assert "record 17" not in run.trials.read_text() + run.search_record.read_text()


@pytest.mark.slow
def test_a_continued_search_is_about_the_same_records_and_arguments(tmp_path, coarse_grid):
    search = begin(tmp_path / "own")
    files = [search.folder.manifest, search.folder.path / "built.json", search.folder.terms]
    before = [path.read_bytes() for path in files]
    begin(tmp_path / "own")
    assert [path.read_bytes() for path in files] == before
    for other, key in (
        ({"data": rows(RECORDS, 8)}, "private records"),
        ({"score": {"public": rows(EVAL_DATA, 8)}}, "private records"),
        ({"num_trials": {"name": "fixed", "runs": 4}}, "folder="),
        ({"space": {"lr": {"uniform": [0.1, 1]}}}, "folder="),
    ):
        with pytest.raises(UserError, match=key):
            prepare(tmp_path / "own", **other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["terms.json", "built.json"])
def test_a_search_that_was_broken_off_while_it_was_drawn_is_drawn_once(
    tmp_path, coarse_grid, monkeypatch, name
):
    """Else the number of trials and their values could be drawn until they please."""
    written = searching.write_json

    def broken(path: Path, *given: Any, **options: Any) -> None:
        if path.name == name:
            raise KeyboardInterrupt
        written(path, *given, **options)

    folder = SearchFolder(RunFolder(tmp_path / "own"))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        for module in (searching, sys.modules["dpdist.tuning.search"]):
            patched.setattr(module, "write_json", broken)
        begin(tmp_path / "own", num_trials=POISSON)
    drawn = folder.manifest.read_bytes()
    assert not folder.terms.exists()
    begin(tmp_path / "own", num_trials=POISSON)
    assert folder.manifest.read_bytes() == drawn and read_terms(folder)["assumed"]
    values = [json.dumps(trial.values, sort_keys=True) for trial in read_trials(folder)]
    assert set(read_json(folder.path / "built.json")) == set(values)


class Interrupted(torch.optim.SGD):
    """Ctrl-C in step number `stop_at` of each optimizer, if it is set."""

    stop_at = 0

    def step(self, closure: Any = None) -> None:
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == Interrupted.stop_at:
            raise KeyboardInterrupt
        super().step()


def interrupted(config: Any) -> PrivateTraining:
    model = nn.Linear(WIDTH, 2)
    optimizer = Interrupted(model.parameters(), lr=config["lr"])
    resources = {"checkpoint_seconds": 1e-6}
    return build(config, model=model, optimizer=optimizer, resources=resources)


def run_interrupted_trial(search: Any, number: int, patch: pytest.MonkeyPatch, step: int) -> None:
    with patch.context() as inner, pytest.raises(KeyboardInterrupt):
        inner.setattr(Interrupted, "stop_at", step)
        run_trial(search, number)
    assert not read_scores(search.folder, number)["done"]


@pytest.mark.slow
def test_an_interrupted_trial_is_replayed_to_the_same_end(tmp_path, coarse_grid, monkeypatch):
    """Broken off inside a step: the same keys, and the scores of a trial that was not."""
    options = {
        "privacy": {**PRIVATE, "run_key": "7f" * 32},
        "score": {"private_eval_data": SCORED, "noise": 3.0},
    }
    whole = begin(tmp_path / "whole", interrupted, **options)
    search = begin(tmp_path / "own", interrupted, **options)
    run_interrupted_trial(search, 1, monkeypatch, step=3)
    assert run_trial(search, 1)["failed"] is None
    run_trial(whole, 1)
    states = [load(each.folder.trial_folder(1).model_folder) for each in (search, whole)]
    assert torch.equal(states[0].weight, states[1].weight)
    for each in (search, whole):
        ledger = Ledger.read(each.folder.trial_folder(1).ledger)
        assert ledger.release_counts == dict.fromkeys(range(4), 1)


def test_a_trial_that_is_not_replayed_exactly_has_failed(tmp_path, coarse_grid, monkeypatch):
    """Other code than before the interruption: the step would be released a second time."""
    search = begin(tmp_path / "own", interrupted)
    run_interrupted_trial(search, 0, monkeypatch, step=1)
    monkeypatch.setattr("dpdist.private_training.code_digest_of", lambda *code: "edited")
    assert run_trial(search, 0)["failed"] == "the training could not be replayed exactly"


def test_a_model_that_changes_between_steps_makes_a_trial_fail(tmp_path, coarse_grid):
    def train(config: Any) -> PrivateTraining:
        model = nn.Linear(WIDTH, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        class Meddling(torch.optim.lr_scheduler.StepLR):
            def step(self, epoch: Any = None) -> None:
                super().step()
                model.weight.data *= 0.99

        given = {"model": model, "optimizer": optimizer}
        return build(config, **given, state=[Meddling(optimizer, 1)])

    search = begin(tmp_path / "own", train)
    assert run_trial(search, 0)["failed"] == "parameters changed between steps"
