"""A private search whose unit is a user: users are held out, and each is counted once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from support.training import parameters
from support.users import MOST, USERS, recipe_of, write

from dpdist import UserError, models, pipeline
from dpdist.core.files import read_json
from dpdist.data.dataset import Dataset
from dpdist.data.record_hashes import hash_users
from dpdist.privacy.phases import GaussianReleases, GaussianSteps, ParallelParts
from dpdist.privacy.plan import UserUnit
from dpdist.publishing import write_release
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe
from dpdist.training.records import data_source, records_with_canaries
from dpdist.tuning import scoring
from dpdist.tuning.manifest import read_scores, read_trials
from dpdist.tuning.search import check_search, prepare_search
from dpdist.tuning.space import RecordCounts, SearchCost, TrialLimit
from dpdist.tuning.trial import scoring_data

RUNS, NOISE = 3, 2.0
TUNE: dict[str, Any] = {
    "space": {"training.learning_rate": {"log_uniform": [0.1, 1.0]}},
    "num_trials": {"name": "fixed", "runs": RUNS},
    "score": {"private_eval_fraction": 0.3, "noise": NOISE},
}


def public_scans(root: Path) -> None:
    write(root, split="test", seed=1, users=20, name="other {}")


@pytest.fixture
def root(tmp_path) -> Path:
    write(tmp_path / "data")
    public_scans(tmp_path / "data")
    return tmp_path / "data"


def asked(root: Path, **sections: Any) -> Recipe:
    steps = {"training__steps": 4, "training__epochs": None}
    return recipe_of(root, **{"tune": TUNE, **steps, **sections})


def sides(recipe: Recipe) -> tuple[Dataset, Dataset]:
    """The records that a trial trains on, and those that it is scored on."""
    held = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"private_eval_fraction": 0.3})}
    )
    return records_with_canaries(held, data_source(recipe)), scoring_data(recipe)


def names(part: Dataset) -> set[bytes]:
    return set(part.user_hashes.tolist())


def test_whole_users_are_held_out_and_everything_is_counted_from_them(root, tmp_path):
    recipe = asked(root)
    search = check_search(recipe, RunFolder(tmp_path / "x"), "r.yaml")
    trained, scored = sides(recipe)
    assert len(trained) + len(scored) == USERS and 8 < len(scored) < 30
    assert not names(trained) & names(scored)
    assert len(trained.hashes) + len(scored.hashes) > 3 * USERS, "users are records"
    plan, (training, scores) = search.cost.plan, search.cost.plan.phases[0].parts
    assert plan.user == UserUnit("patient", MOST) and plan.records == len(trained)
    rate = 12 / len(trained)
    assert training == (GaussianSteps(4 * RUNS, 1.0, rate),)
    assert scores == (GaussianReleases(NOISE, RUNS),)
    trial = search.example_trial()[1]
    assert trial.user == plan.user and trial.step(0).sample_rate == rate
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("share", [{}, {"data__public": 0.2, "data__private_eval_fraction": 0.1}])
def test_one_person_s_removal_moves_no_other_to_another_side(root, tmp_path, share):
    """However many records a person has, on either side."""
    own = write(root)
    before = [names(part) for part in sides(asked(root, **share))]
    for who in sorted(set(own), key=own.count)[-8:]:
        fewer = tmp_path / who
        write(fewer, drop=who)
        public_scans(fewer)
        after = [names(part) for part in sides(asked(fewer, **share))]
        lost = [one - other for one, other in zip(before, after, strict=True)]
        assert not any(other - one for one, other in zip(before, after, strict=True))
        assert sum(map(len, lost)) <= 1
        assert share or any(lost), "with no records aside, each user is on one of both sides"


def test_the_price_is_that_of_as_many_records_and_worked_out_by_dp_accounting(root, tmp_path):
    recipe = asked(root)
    cost = check_search(recipe, RunFolder(tmp_path / "x"), "r.yaml").cost
    trained, _ = sides(recipe)
    single = asked(root, privacy={"noise_multiplier": 1.0, "delta": 1e-3})
    sizes = RecordCounts(USERS, 0.3, lambda _: len(trained))
    same = SearchCost(single, sizes, recipe.tune.num_trials)
    assert cost.guarantee.epsilon == same.guarantee.epsilon
    assert cost.guarantee.relation == cost.one_training_guarantee.relation
    assert cost.guarantee.relation.startswith("zero-out of a user")
    step = dpa.PoissonSampledDpEvent(12 / len(trained), dpa.GaussianDpEvent(1.0))
    paths = []
    for event, count in ((step, 4 * RUNS), (dpa.GaussianDpEvent(NOISE), RUNS)):
        accountant = PLDAccountant(dpa.NeighboringRelation.REPLACE_SPECIAL)
        accountant.compose(dpa.SelfComposedDpEvent(event, count))
        paths.append(accountant.get_epsilon(1e-3))
    assert cost.guarantee.epsilon == pytest.approx(max(paths), rel=1e-2)
    assert not np.isclose(*paths), "the two sides would be taken for one another"


def test_a_trial_for_single_records_is_not_covered(root, tmp_path):
    search = check_search(asked(root), RunFolder(tmp_path / "x"), "r.yaml")
    limit, trial = search.cost.trial_limit, search.example_trial()[1]
    assert limit.allows(trial)
    assert not limit.allows(replace(trial, user=None))
    assert not limit.allows(replace(trial, user=UserUnit("patient", MOST + 1)))
    records = TrialLimit(replace(limit.base_plan, user=None))
    assert not records.allows(trial) and records.allows(replace(trial, user=None))


def searched(recipe: Recipe, folder: Path, run_trials: Any) -> Any:
    search = prepare_search(recipe, RunFolder(folder), "r.yaml")
    run_trials(search)
    return search


def final_scores(search: Any) -> list[float]:
    numbers = [trial.number for trial in read_trials(search.folder)]
    return [read_scores(search.folder, number)["scores"][-1] for number in numbers]


@pytest.mark.slow
def test_a_held_out_person_moves_each_score_and_the_best_by_one_at_most(root, tmp_path, run_trials):
    """Neighbor replay of a whole search under fixed keys: each trial trains to the same bits, and
    the noisy sums, and so the best, move by at most the one user that is paid for."""
    recipe, own = asked(root), write(root)
    hidden = names(scoring_data(recipe))
    held = [who for who in set(own) if hash_users([who]) in hidden]
    who = max(held, key=own.count)
    assert own.count(who) > MOST
    fewer = tmp_path / "fewer"
    write(fewer, drop=who)
    public_scans(fewer)
    one, other = (
        searched(asked(each), tmp_path / name, run_trials)
        for each, name in ((root, "one"), (fewer, "other"))
    )
    for number in range(RUNS):
        assert torch.equal(*(parameters(each.folder.trial_folder(number)) for each in (one, other)))
    sums = [np.array(final_scores(each)) * len(scoring_data(each.recipe)) for each in (one, other)]
    moved = sums[0] - sums[1]
    assert (abs(moved) <= 1 + 1e-3).all() and (abs(moved) > 1e-3).any(), moved
    assert abs(max(sums[0]) - max(sums[1])) <= 1 + 1e-3


def test_each_score_of_a_search_counts_users_and_carries_the_noise_paid_for(
    root, tmp_path, run_trials, monkeypatch
):
    found = []
    real = scoring.add_noise

    def noted(total, key, std):
        found.append((float(total[0]), std))
        return real(total, key, std)

    monkeypatch.setattr(scoring, "add_noise", noted)
    search = searched(asked(root), tmp_path / "x", run_trials)
    assert {std for _, std in found} == {NOISE} and len(found) == RUNS
    scored = scoring_data(search.recipe)
    whom = scored.user_hashes
    for number, (total, _) in enumerate(found):
        model = models.load(search.folder.trial_folder(number).model_folder)
        with torch.inference_mode():
            guessed = model(scored.records.batch(slice(None))).argmax(1)
        right = (guessed == scored.records.targets(slice(None))).numpy()
        means = [right[whom == each].mean() for each in np.unique(whom)]
        assert total == pytest.approx(sum(means), abs=1e-4)
    assert max(total for total, _ in found) <= len(scored)


@pytest.mark.slow
def test_a_search_becomes_a_run_that_states_its_users(root, tmp_path):
    privacy = {"epsilon": 4.0, "delta": 1e-3, "unit": "user", "max_records_per_user": MOST}
    recipe = asked(root, privacy=privacy)
    pipeline.tune(recipe, runs=tmp_path / "runs", context="r.yaml", executor="local")
    run = RunFolder(tmp_path / "runs" / "x")
    facts, unit = load_results(run), UserUnit("patient", MOST)
    assert facts.guarantee.user is not None and 3.9 < facts.guarantee.epsilon <= 4.0
    assert facts.search.plan.user == unit == run.read_plan().user
    assert read_json(run.search_record)["one_training"]["user"] == facts.guarantee.user
    card = facts.privacy_card()
    assert card["relation"] == facts.guarantee.relation and card["unit"].startswith("a user")
    assert not [line for line in card["assumptions"] if "every record" in line]
    write_release(run)
    stated = json.loads((run.release_folder / "privacy_card.json").read_text())
    assert stated["guarantee"]["epsilon"] == facts.guarantee.epsilon


def test_a_secret_number_of_trials_is_of_users_as_well(root, tmp_path):
    tune = {**TUNE, "num_trials": {"name": "geometric", "mean": 3.0}}
    cost = check_search(asked(root, tune=tune), RunFolder(tmp_path / "x"), "r.yaml").cost
    (inner,) = cost.plan.phases[0].phases
    assert isinstance(inner, ParallelParts)
    assert cost.guarantee.user == UserUnit("patient", MOST).description


def refuse(recipe: Recipe, folder: Path, key: str) -> None:
    with pytest.raises(UserError, match=key):
        prepare_search(recipe, RunFolder(folder), "r.yaml")


def test_a_budget_of_records_takes_no_search_of_users(root, tmp_path):
    """Persons and records never mix: neither a search nor any of its trials can name a budget."""
    privacy = {"noise_multiplier": 1.0, "delta": 1e-3, "budget": str(tmp_path / "budget")}
    with pytest.raises(UserError, match="budget"):
        asked(root, privacy={**privacy, "unit": "user", "max_records_per_user": MOST})
    changed = {**TUNE, "space": {"privacy.unit": {"choice": ["record", "user"]}}}
    refuse(asked(root, privacy=privacy, tune=changed), tmp_path / "x", r"privacy\.unit")
    assert not (tmp_path / "budget").exists() and not (tmp_path / "x").exists()


@pytest.mark.parametrize(("name", "common"), [("patient {}", 15), ("stranger {}", 0)])
def test_public_records_to_score_on_have_no_private_user(root, tmp_path, name, common):
    write(root / "more", seed=7, users=15, name=name)
    public = {"name": "scans", "root": str(root / "more"), "split": "train"}
    recipe = asked(root, tune={**TUNE, "score": {"public": public}})
    if common:
        refuse(recipe, tmp_path / "x", rf"tune\.score\.public: {common} ")
        return
    cost = check_search(recipe, RunFolder(tmp_path / "x"), "r.yaml").cost
    assert cost.score_noise is None and cost.plan.user == UserUnit("patient", MOST)


def test_a_nameless_held_out_record_is_refused(root, tmp_path):
    write(root, change=lambda own: [*own[:-1], None])
    refuse(asked(root), tmp_path / "x", "column 'patient'")


def test_a_search_goes_on_with_the_users_it_was_begun_with(root, tmp_path):
    recipe = asked(root)
    prepare_search(recipe, RunFolder(tmp_path / "x"), "r.yaml")
    prepare_search(recipe, RunFolder(tmp_path / "x"), "r.yaml")
    hidden = names(scoring_data(recipe))
    whom = write(root)
    rich = max(set(whom), key=whom.count)
    first = whom.index(rich)
    side = {each: hash_users([each]) in hidden for each in set(whom)}
    other = next(each for each in whom if each != rich and side[each] == side[rich])
    write(root, change=lambda own: [*own[:first], other, *own[first + 1 :]])
    refuse(recipe, tmp_path / "x", "private records changed")
