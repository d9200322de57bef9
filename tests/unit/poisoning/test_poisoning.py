"""Votes against poisoning: whose count, what they certify, and that none leaves private/."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load as load_tensors
from scipy import stats
from support.settings import sets
from support.training import make

from dpdist import models, pipeline
from dpdist.core.errors import UserError
from dpdist.poisoning import job as voting_models
from dpdist.poisoning.certificates import (
    FILE,
    NONE,
    BaggingPoisoningBound,
    PoisoningBound,
    PrivatePoisoningBound,
    Votes,
    certify_partitioned_models,
    certify_random_models,
    draw_subset,
    min_votes,
    read_votes,
)
from dpdist.poisoning.evaluation import Poisoning
from dpdist.poisoning.job import Voter
from dpdist.privacy.phases import GaussianSteps
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, find_recipe, load_recipe, make_plan
from dpdist.training import ensembles
from dpdist.training.ensembles import plan_of_shard, shards_by_hash
from dpdist.training.loop import TrainingDiverged
from dpdist.training.records import data_source, load_test_records, records_with_canaries

SEED = "5b" * 32
PLAN = PrivacyPlan(1000, (GaussianSteps(1, 10.0, 1.0),), 1e-5)
POISONED = PrivatePoisoningBound(PLAN)  # keeps what it worked out


def votes_of(vote: Any, label: Any = None) -> Votes:
    vote = np.array(vote, dtype=np.int64)
    inputs = vote.shape[1]
    label = np.zeros(inputs, np.int64) if label is None else np.array(label)
    return Votes({}, np.arange(inputs), label, vote)


# ---- what votes certify


def test_the_class_is_chosen_by_models_that_do_not_count() -> None:
    # Input 0: all say 0. Input 1: the choosing models say 1, the others 0: nothing is certified.
    vote = np.zeros((34, 2), np.int64)
    vote[:4, 1] = 1
    found = certify_random_models(votes_of(vote), POISONED, select=4, alpha=0.01)
    assert found.prediction.tolist() == [0, 1] and found.num_models == 30
    sure = 0.01 ** (1 / 30)
    assert found.max_changes[0.0].tolist() == [POISONED.max_changes(sure), -1]
    assert found.max_changes[0.0][0] == int(stats.norm.ppf(sure) / 0.1)  # mu is 1 / 10


@pytest.mark.parametrize("bound", [POISONED, BaggingPoisoningBound(1000, 100)])
def test_the_fewest_votes_that_can_certify_a_change(bound: PoisoningBound) -> None:
    fewest = min_votes(bound, 0.001)
    for votes, changes in ((fewest - 1, False), (fewest, True)):
        agreed = votes_of(np.zeros((int(votes) + 1, 1)))
        found = certify_random_models(agreed, bound, select=1, alpha=0.001)
        assert (found.largest_changes >= 1) is changes
    assert min_votes(BaggingPoisoningBound(10, 10), 0.001) == math.inf


def test_an_input_may_move_besides() -> None:
    asked: Any = {"select": 6, "alpha": 0.001, "radii": (0.0, 0.1, 9.0), "sigma": 0.2}
    found = certify_random_models(votes_of(np.zeros((66, 1))), POISONED, **asked)
    room = stats.norm.ppf(0.001 ** (1 / 60))
    expected = [int(room / 0.1), int((room - 0.1 / 0.2) / 0.1), -1]
    assert [int(changes[0]) for changes in found.max_changes.values()] == expected
    assert found.certified_accuracy(np.zeros(1), 0, 0.1) == 1
    assert found.certified_accuracy(np.zeros(1), 0, 9.0) == 0
    assert found.certified_accuracy(np.ones(1), 0) == 0  # certified, and wrong


@pytest.mark.parametrize(
    ("changed", "key"), [({"select": 3}, "select"), ({"radii": (0.1,)}, "sigma")]
)
def test_what_cannot_be_certified_is_refused(changed: Any, key: str) -> None:
    with pytest.raises(UserError, match=key):
        certify_random_models(
            votes_of(np.zeros((3, 1))), POISONED, **{"select": 1, "alpha": 0.1, **changed}
        )


def test_partitions_withstand_exactly_so_many_moved_votes() -> None:
    # Every way in which 5 models can vote, and in which k of them can be made to vote otherwise.
    every = np.array(list(itertools.product(range(3), repeat=5)))
    found = certify_partitioned_models(votes_of(every.T))

    def winner(votes: np.ndarray) -> int:
        return int(np.bincount(votes, minlength=3).argmax())

    def moved(votes: np.ndarray, changes: int) -> bool:
        for places in itertools.combinations(range(5), changes):
            for values in itertools.product(range(3), repeat=changes):
                other = votes.copy()
                other[list(places)] = values
                if winner(other) != winner(votes):
                    return True
        return False

    for votes, answer, changes in zip(every, found.prediction, found.max_changes[0.0], strict=True):
        assert answer == winner(votes)
        assert not moved(votes, int(changes)) and moved(votes, int(changes) + 1)


def test_a_class_that_nobody_named_may_win() -> None:
    # All say 0, which is every label: of 3 votes two moved to class 1 win, of 2 one makes a tie.
    for votes, changes in ((1, 0), (2, 1), (3, 1), (4, 2)):
        found = certify_partitioned_models(votes_of([[0]] * votes))
        assert found.prediction.tolist() == [0] and found.max_changes[0.0].tolist() == [changes]


def test_a_vote_for_nothing_counts_for_no_class() -> None:
    found = certify_partitioned_models(votes_of([[NONE], [NONE], [NONE], [0], [0]]))
    assert found.prediction.tolist() == [0] and found.max_changes[0.0].tolist() == [1]
    found = certify_random_models(votes_of([[0]] + [[NONE]] * 9), POISONED, select=1, alpha=0.1)
    assert found.max_changes[0.0].tolist() == [-1]
    # Where no model names a class, no class is answered: not the first one.
    found = certify_partitioned_models(votes_of([[NONE, 1]] * 9))
    assert found.prediction.tolist() == [NONE, 1] and found.max_changes[0.0].tolist() == [-1, 4]
    assert found.certified_accuracy(np.array([0, 1]), 0) == 0.5
    found = certify_random_models(
        votes_of([[NONE, 1]] + [[0, 1]] * 50), POISONED, select=1, alpha=0.1
    )
    assert found.prediction.tolist() == [NONE, 1] and found.max_changes[0.0][0] == -1


# ---- whose votes they are


def recipe_of(tmp_path: Path, **more: Any) -> Recipe:
    """Full batches of a linear model: cheap, and its loss has a closed form."""
    values: dict[str, Any] = {
        "data__max_train": 200, "training__batch_size": 50, "training__steps": 4,
        "model": "linear", "privacy__run_key": None, "privacy__noise_multiplier": 8.0,
        "resources": {},  # no checkpoint of a training of seconds
    }  # fmt: skip
    recipe, _ = make(tmp_path, **(values | more))
    records = len(records_with_canaries(recipe, data_source(recipe)))
    recipe, _ = make(tmp_path, **(values | more | {"training__batch_size": records}))
    (tmp_path / "x.yaml").write_text(recipe.to_yaml())
    return recipe


def begun(recipe: Recipe, tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / recipe.name)
    folder.create_or_open(recipe)
    return folder


def answers_of(
    recipe: Recipe, plan: PrivacyPlan, voter: Voter, members: Any, number: int, rows: Any
) -> list[int]:
    """What the training of these members by the key of that voter says."""
    key = derive_key(bytes.fromhex(SEED), "voter", number)
    with ensembles.train_in_process(recipe, plan, voter._records, members, key) as folder:
        model = models.load(folder)
        around = folder.parents[2]  # with the run key in it
        assert around.stat().st_mode & 0o777 == 0o700 and list(around.glob("*.lock"))
    with torch.inference_mode():
        return model(voter._test.batch(rows)).argmax(1).tolist()


def test_each_voter_is_a_training_of_the_recipe_by_a_key_of_its_own(
    dpdist_without_ray: Any, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path)
    settings = Poisoning(models=3, seed=SEED, every=40)
    votes = read_votes(pipeline.evaluation_stage(recipe, begun(recipe, tmp_path), settings))
    voter = Voter(setup_of(recipe, settings))
    rows = np.arange(0, len(voter._test), 40)
    assert votes.index.tolist() == rows.tolist()
    assert votes.label.tolist() == np.asarray(voter._test.labels)[rows].tolist()
    plan, every = make_plan(recipe, len(voter._records), "x"), np.ones(len(voter._records), bool)
    for number in range(2):
        said = answers_of(recipe, plan, voter, every, number, rows)
        assert votes.vote[number].tolist() == said
    assert len({tuple(each) for each in votes.vote.tolist()}) == 3


def test_models_that_are_alike_vote_under_noises_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tmp_path)
    voter = Voter(setup_of(recipe, Poisoning(models=2, seed=SEED, sigma=3.0)))
    real = ensembles.train_in_process
    monkeypatch.setattr(
        voting_models, "train_in_process", lambda *of, **_: real(*of[:-1], b"k" * 32)
    )
    first, second = (load_tensors(voter(number)[FILE])["votes"] for number in (0, 1))
    assert (first != second).any()


def test_a_changed_record_moves_one_partition(dpdist_without_ray: Any, tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    settings = Poisoning(models=4, partitions=True, seed=SEED, every=20)
    own, plan = settings.training_plan(recipe, 200)
    assert own.privacy.clipping == "none" and plan.records == 50
    # What a shard's training does follows from the shard, not from how many records there are.
    assert settings.training_plan(recipe, 20)[0] == own and own.training.batch_size > 50
    votes = read_votes(pipeline.evaluation_stage(recipe, begun(recipe, tmp_path), settings))
    voter = Voter(setup_of(recipe, settings))
    hashes = voter._records.hashes
    shards = shards_by_hash(hashes, b"", 4)
    assert shards_by_hash(hashes[1:], b"", 4).tolist() == shards[1:].tolist()
    for number in range(2):
        members = shards == number
        there, plan = plan_of_shard(own, int(members.sum()))
        said = answers_of(there, plan, voter, members, number, votes.index)
        assert votes.vote[number].tolist() == said


def test_each_bag_is_drawn_by_a_key_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    voter = Voter(setup_of(recipe_of(tmp_path), Poisoning(models=3, seed=SEED, bag=30)))
    drawn = []

    def training(*of: Any, **_: Any) -> Any:
        drawn.append(of[3:])
        raise TrainingDiverged("at once")

    monkeypatch.setattr(voting_models, "train_in_process", training)
    for number in range(3):
        assert (load_tensors(voter(number)[FILE])["votes"] == NONE).all()
    assert all(members.sum() == 30 for members, _ in drawn)
    assert len({members.tobytes() for members, _ in drawn}) == len({key for _, key in drawn}) == 3


def subject_of(recipe: Recipe) -> Any:
    source = data_source(recipe)
    return SimpleNamespace(
        load_training_data=lambda: records_with_canaries(recipe, source),
        test_data=load_test_records(recipe, source),
        recipe=recipe,
    )


def setup_of(recipe: Recipe, settings: Poisoning) -> Any:
    return settings.job_spec(subject_of(recipe)).setup_of_seed(SEED)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_command_prints_what_is_withstood_and_keeps_it_private(
    dpdist_without_ray: Any, tmp_path: Path
) -> None:
    recipe_of(tmp_path)
    given = sets("poison", "models=6", "select=2", "alpha=0.3", "every=40", "changes=[0,1]")
    asked = ("audit", "x.yaml", "--kind", "poison", *given)
    done = dpdist_without_ray(*asked)
    assert done.code == 0, done.err
    files = [p.relative_to(tmp_path / "runs/x") for p in (tmp_path / "runs/x").rglob("*.*")]
    outside = {str(path) for path in files if path.parts[0] != "private"}
    assert outside == {"recipe.yaml", "run.json"}
    home = tmp_path / "runs/x/private/attacks/poisoning-models-6-every-40"
    assert len((home / "inputs.csv").read_text().splitlines()) == 10
    table = (home / "votes.parquet").read_bytes()
    # Interrupted and continued: the same bytes.
    (home / "votes.parquet").unlink()
    lines = (home / "journal.jsonl").read_text().splitlines(keepends=True)
    (home / "journal.jsonl").write_text("".join(lines[:3]))
    shutil.rmtree(home / "models/0004")
    assert dpdist_without_ray(*asked).out == done.out
    assert (home / "votes.parquet").read_bytes() == table
    # Of another seed: said without the secret one.
    done = dpdist_without_ray(*asked, "--set", f"poison.seed={SEED}")
    secret = json.loads((home / "settings.json").read_text())["seed"]
    assert done.code == 2 and secret not in done.err


@pytest.mark.slow
def test_a_bag_is_trained_on_records_that_its_key_draws(
    dpdist_without_ray: Any, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path)
    given = sets("poison", "bag=30", "models=4", "select=2", "every=40", f"seed={SEED}")
    done = dpdist_without_ray("audit", "x.yaml", "--kind", "poison", *given)
    assert done.code == 0, done.err
    home = tmp_path / "runs/x/private/attacks/poisoning-bags-of-30-4-every-40"
    votes = read_votes(home / "votes.parquet")
    settings = Poisoning(models=4, seed=SEED, every=40, bag=30)
    voter = Voter(setup_of(recipe, settings))
    own, _ = settings.training_plan(recipe, len(voter._records))
    there, plan = plan_of_shard(own, 30)
    assert own.privacy.clipping == "none"
    for number in range(2):
        key = derive_key(bytes.fromhex(SEED), "voter", number)
        members = draw_subset(derive_key(key, "bag"), len(voter._records), 30)
        said = answers_of(there, plan, voter, members, number, votes.index)
        assert votes.vote[number].tolist() == said and members.sum() == 30
    # What a bag's training does follows from its size, not from how many records there are.
    assert settings.training_plan(recipe, 90)[1] == settings.training_plan(recipe, 2000)[1]


def test_votes_of_a_given_seed_are_told_apart(tmp_path: Path) -> None:
    """Whoever gave it could have tried others: a table says which it is of, and so does the job."""
    subject = subject_of(recipe_of(tmp_path))
    given, secret = (Poisoning(models=2, seed=s).job_spec(subject).identity() for s in (SEED, None))
    assert given["settings"].pop("seed_given") and not secret["settings"].pop("seed_given")
    assert given == secret and SEED not in json.dumps(given)
    others: tuple[dict[str, Any], ...] = (
        {"models": 3}, {"sigma": 0.5}, {"sigma": 0.5 + 1e-9}, {"partitions": True}, {"bag": 20},
        {"start": 1}, {"every": 2}, {"max_inputs": 3},
    )  # fmt: skip
    jobs = [Poisoning(**{"models": 2, **other}).job_spec(subject).identity() for other in others]
    assert len({json.dumps(job, sort_keys=True) for job in (secret, *jobs)}) == 1 + len(others)


def test_a_training_that_one_record_stops_withstands_nothing() -> None:
    recipe = load_recipe(find_recipe("digits-noisy-records"))
    with pytest.raises(UserError, match=recipe.name):
        Poisoning().training_plan(recipe, 1000)
