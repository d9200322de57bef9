"""Private prediction: what one record can move, what noise hides it, and that no answer is free."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from support.local_execution import Done, command, run_without_ray
from support.recipes import write_recipe
from support.training import make
from test_pate import what_leaves

from dpdist.cluster.executor import LocalExecutor
from dpdist.core.errors import UserError
from dpdist.evaluation import require_model
from dpdist.methods.private_prediction import (
    PrivatePrediction,
    PrivatePredictionExecution,
    clip_logits,
)
from dpdist.privacy.budget import read_budgets
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.mechanisms import gaussian_epsilon
from dpdist.privacy.phases import GaussianAnswers, GaussianSteps, Phase
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.training.ensembles import QueryOracle
from dpdist.training.job import prepare
from dpdist.training.trainer import fit

METHOD = {"name": "private-prediction", "teachers": 5, "logit_bound": 2.0, "queries": 6}
RAW: dict[str, Any] = {
    "name": "x",
    "data": {"name": "digits"},
    "model": "linear",
    "method": METHOD | {"evaluate": 3},
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-4, "nominal_records": 1400},
    "training": {"batch_size": 50, "steps": 3, "learning_rate": 0.5},
}


def method(**more: Any) -> PrivatePrediction:
    return PrivatePrediction(**(METHOD | more))


def plan_of(noise: float, queries: int = 6, **more: Any) -> PrivacyPlan:
    phases: tuple[Phase, ...] = (GaussianAnswers(noise, queries),)
    return PrivacyPlan(1400, phases, 1e-5, nominal=True, **more)


# ---- what one record moves


def extremes(rng: np.random.Generator) -> list[np.ndarray]:
    """What a teacher could say: anything."""
    few = [np.zeros(4), np.array([1e300, -1e300, 0, 0]), np.array([np.nan, 1, 2, 3])]
    few += [np.array([np.inf, 0, 0, 0]), np.full(4, -1e308), np.array([1.0, -1, 0, 0]) * 1e-200]
    return few + [rng.normal(size=4) * 10.0 ** rng.integers(-3, 4) for _ in range(30)]


def test_one_teacher_moves_an_answer_by_its_share_at_most() -> None:
    rng, bound, teachers = np.random.default_rng(5), 2.0, 5
    everything, others = extremes(rng), rng.normal(size=(4, 4)) * 3
    one = method(logit_bound=bound, teachers=teachers)

    def mean(said: np.ndarray) -> np.ndarray:
        scores = np.vstack([others, said])
        return one.execution().answer(scores, plan_of(0.0), b"k" * 32)

    answers = np.array([mean(said) for said in everything])
    apart = np.linalg.norm(answers[:, None] - answers[None], axis=2)
    most = 2 * bound / teachers
    assert apart.max() <= most * (1 + 1e-12)
    opposed = np.array([3.0, -3, 0, 0])
    assert np.linalg.norm(mean(opposed) - mean(-opposed)) == pytest.approx(most)  # attained
    # The noise is in units of that.
    assert one.noise_std(plan_of(2.5), teachers) == pytest.approx(2.5 * most)


def is_noise_of(std: float, values: np.ndarray) -> bool:
    """A two-sided test of the variance that is wrong about the right one with probability 1e-6."""
    total = float((values**2).sum()) / std**2
    return chi2.ppf(5e-7, values.size) <= total <= chi2.ppf(1 - 5e-7, values.size)


def test_the_noise_is_the_plans() -> None:
    one, plan = method(), plan_of(3.0)
    keys = [i.to_bytes(32, "little") for i in range(300)]
    found = np.array([one.execution().answer(np.zeros((5, 10)), plan, key) for key in keys])
    std = 3.0 * 2 * 2.0 / 5  # noise multiplier, 2 B / K
    assert is_noise_of(std, found)
    assert not is_noise_of(std * 2 / 3, found) and not is_noise_of(std * 3 / 2, found)
    assert not is_noise_of(std * 0.9, found)
    assert np.array_equal(one.execution().answer(np.zeros((5, 10)), plan, keys[0]), found[0])
    # It hides a constant, and does not change with what it hides.
    scores = np.random.default_rng(0).normal(size=(5, 10))
    exact = clip_logits(scores, 2.0).mean(axis=0)
    hidden = one.execution().answer(scores, plan, keys[0]) - exact
    assert np.allclose(hidden, found[0], atol=1e-6)


# ---- what it costs


def test_epsilon_is_that_of_one_gaussian() -> None:
    teachers, bound, std, queries = 7, 2, 3, 13
    mu = 2 * bound * math.sqrt(queries) / (teachers * std)
    one = method(teachers=teachers, logit_bound=bound, queries=queries)
    steps = GaussianSteps(5, teachers * std / (2 * bound), 0.1)
    phases = one.cost(steps)
    plan = PrivacyPlan(1400, phases, 1e-5, nominal=True)
    assert one.noise_std(plan, teachers) == pytest.approx(std)
    assert plan.steps == 0 and plan.num_queries == queries
    found = plan.guarantee()
    exact, twice = (float(gaussian_epsilon(1e-5, 1.0, each)) for each in (mu, 2 * mu))
    assert found.epsilon == pytest.approx(exact, rel=1e-3)
    assert found.relation == "add-or-remove-one"  # nothing follows the number of records
    # A record in place of another changes two teachers.
    replaced = PrivacyPlan(1400, phases, 1e-5, adjacency="replace-one", nominal=True)
    assert replaced.guarantee().epsilon == pytest.approx(twice, rel=1e-3)
    assert PrivacyPlan.from_dict(plan.to_dict()) == plan


# ---- answers on the run's own ledger


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with a fixed key whose models never leave, and that may give six answers."""
    before = torch.get_num_threads()
    place = tmp_path_factory.mktemp("trained")
    recipe, folder = make(
        place, data={"name": "digits", "fraction": 0.1}, model="linear",
        method={"name": "private-prediction", "teachers": 2, "logit_bound": 2.0, "queries": 6},
        training={"batch_size": 20, "steps": 2, "learning_rate": 0.5},
    )  # fmt: skip
    fit(prepare(recipe, folder, "test"), LocalExecutor())
    yield folder.path
    torch.set_num_threads(before)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(trained, tmp_path / "run")))


def inputs(count: int) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_no_answer_is_given_on_a_ledger_that_lost_what_was_given(run: RunFolder) -> None:
    """Lost after the run was opened: made anew, it would pay for all answers again."""
    recipe = run.read_recipe()
    first = QueryOracle(recipe, run)
    first(inputs(6))
    assert first.answers_left == 0
    late = QueryOracle(recipe, run)
    run.ledger.unlink()
    run.anchor.unlink()
    with pytest.raises(UserError):
        late(inputs(7)[6:])
    with pytest.raises(UserError):
        QueryOracle(recipe, run)


def test_answers_under_a_fixed_key_are_repeatable_and_no_two_share_noise(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RunFolder(Path(shutil.copytree(run.path, tmp_path / "other")))
    keys: list[bytes] = []
    real = PrivatePredictionExecution.answer

    def noted(self: PrivatePredictionExecution, scores: Any, plan: Any, key: bytes) -> Any:
        keys.append(key)
        return real(self, scores, plan, key)

    monkeypatch.setattr(PrivatePredictionExecution, "answer", noted)
    oracle = QueryOracle(run.read_recipe(), run)
    found = torch.cat([oracle(inputs(2)), oracle(inputs(4)[2:])])
    assert len(keys) == len(set(keys)) == 4
    # Four at once are scored by other kernels than two: the noise is the same, not each last bit.
    assert torch.allclose(
        QueryOracle(other.read_recipe(), other)(inputs(4)), found, rtol=0, atol=1e-5
    )
    assert keys[4:] == keys[:4]


def test_a_crash_counts_and_two_at_once_take_one(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = run.read_recipe()
    QueryOracle(recipe, run)(inputs(4))

    def dies(self: PrivatePredictionExecution, scores: Any, plan: Any, key: bytes) -> Any:
        assert Ledger.read(run.ledger).num_queries == 5  # on the disk, before its noise
        raise KeyboardInterrupt

    with monkeypatch.context() as inner, pytest.raises(KeyboardInterrupt):
        inner.setattr(PrivatePredictionExecution, "answer", dies)
        QueryOracle(recipe, run)(inputs(5)[4:])
    assert QueryOracle(recipe, run).answers_left == 1
    meet = threading.Barrier(2)

    def answered(number: int) -> bool:
        oracle = QueryOracle(recipe, run)
        meet.wait()
        try:
            oracle(inputs(8)[number : number + 1])
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(answered, (6, 7))) == [False, True]
    assert Ledger.read(run.ledger).num_queries == 6


# ---- the whole


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    run_without_ray(monkeypatch)
    before = torch.get_num_threads()
    write_recipe(tmp_path, RAW, "x.yaml")
    rng = np.random.default_rng(0)
    for n in range(5):
        np.save(tmp_path / f"{n}.npy", rng.integers(0, 256, (1, 8, 8), dtype=np.uint8))

    def dpdist(*arguments: object) -> Done:
        return command(monkeypatch, capsys, tmp_path, *arguments)

    yield dpdist
    torch.set_num_threads(before)


@pytest.mark.slow
def test_a_run_answers_and_then_no_more(here: Any, tmp_path: Path) -> None:
    done = here("run", "x.yaml")
    assert done.code == 0, done.err
    folder = RunFolder(tmp_path / "runs" / "x")
    assert folder.report_file.exists() and not folder.model_folder.exists()

    def given() -> int:
        return read_verified_ledger(folder).ledger.num_queries

    first = here("predict", "x", "0.npy", "1.npy")
    assert first.code == 0 and given() == 5, first.err
    again = here("predict", "x", "1.npy", "0.npy")  # the same answers, for nothing
    assert again.out.splitlines() == first.out.splitlines()[::-1] and given() == 5
    assert here("predict", "x", "2.npy", "3.npy").code == 2 and given() == 5  # nothing was asked
    last = here("predict", "x", "2.npy", "2.npy", "--json")
    told = [json.loads(line) for line in last.out.splitlines()]
    assert told[0] == told[1] and len(told[0]["scores"]) == 10
    assert told[0]["label"] == int(np.argmax(told[0]["scores"]))
    assert here("predict", "x", "4.npy").code == 2
    assert here("predict", "x", "0.npy").code == 0
    # The same command finds everything done; epsilon is that of all six, whenever it is asked.
    assert here("run", "x.yaml").code == 0 and given() == 6

    for asked in (
        ("release", "x"), ("release", "x", "--not-private"), ("certify", "x", "--sigma", 0.5),
        ("attack", "x", "--set", "attack.norm=l2"), ("audit", "x.yaml", "--kind", "membership"),
        ("audit", "x"), ("audit", "x.yaml"), ("import", "y", "--run", "x", "--classifier", "x"),
    ):  # fmt: skip
        refused = here(*asked)
        assert refused.code == 2 and "never leave" in refused.err
    # Neither teachers, nor a hash of them, by any door.
    assert "model" not in json.loads(folder.evaluation.read_text())
    names = [path.name for path in what_leaves(folder, tmp_path)]
    assert "index.html" in names
    assert not any("teacher" in name or "safetensors" in name for name in names)
    with pytest.raises(UserError):
        require_model(folder.read_recipe(), folder)
    # A ledger with more answers than the plan pays for was not written by this run.
    with Ledger.open(folder.ledger, folder.read_plan().fingerprint()) as ledger:
        ledger.record_query("aa" * 32, plan_of(1.0, queries=9))
    with pytest.raises(UserError, match="answers"):
        read_verified_ledger(folder)


@pytest.mark.slow
def test_a_copy_that_answers_is_charged_for_itself(here: Any, tmp_path: Path) -> None:
    """A run alone pays for all its answers beforehand. Each copy gives as many, with fresh noise:
    the budget is charged for both."""
    ceiling = {"budget": "budgets", "budget_ceiling": 60.0}
    raw = {**RAW, "privacy": RAW["privacy"] | ceiling}
    write_recipe(tmp_path, raw, "x.yaml")
    assert here("run", "x.yaml").code == 0  # three of six answers are given
    folder = RunFolder(tmp_path / "runs" / "x")
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(folder.path, copy.path)
    recipe, rng = folder.read_recipe(), torch.Generator().manual_seed(0)
    inputs = torch.rand(6, 1, 8, 8, generator=rng)
    (budget,) = read_budgets(tmp_path / "budgets")
    whole, cost = folder.read_plan().phases, budget.ceiling.cost
    assert budget.spent == cost(whole, 1400)
    QueryOracle(recipe, folder)(inputs[:2])
    assert read_budgets(tmp_path / "budgets")[0].spent == pytest.approx(budget.spent)
    oracle = QueryOracle(recipe, copy)
    oracle(inputs[3:5])
    oracle(inputs[5:])
    both = (GaussianAnswers(whole[0].noise_multiplier, 3 + 3 + 3),)  # type: ignore[attr-defined]
    assert read_budgets(tmp_path / "budgets")[0].spent == pytest.approx(cost(both, 1400))
