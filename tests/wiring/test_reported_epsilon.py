"""What is printed about a run, after all that can happen to it: its epsilon is that of everything
that was released, by dp-accounting itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting as dpa
import pytest
import torch
import yaml
from dp_accounting.pld import PLDAccountant
from support.training import execute, prepare_job, train_and_crash

from dpdist.core.errors import UserError
from dpdist.evaluation import evaluate_stage, load_model
from dpdist.methods.base import Method
from dpdist.privacy.budget import read_budgets
from dpdist.privacy.guarantee import format_epsilon
from dpdist.privacy.ledger import Ledger
from dpdist.privacy.phases import GaussianSteps, Phase
from dpdist.privacy.plan import PrivacyPlan
from dpdist.publishing import write_release
from dpdist.release.verify import verify_release
from dpdist.reports.html import write_report
from dpdist.reports.results import load_results, read_stage
from dpdist.runs.folder import RunFolder, read_verified_ledger
from dpdist.training import trainer
from dpdist.training.job import TrainJob
from dpdist.training.records import load_test_records

STEPS, RATE, NOISE, DELTA = 12, 12 / 108, 3.0, 1e-3  # max_train 120 lets 108 in
DEAR, CHEAP = 2.0, 8.0


def job_of(tmp: Path, **changes: Any) -> TrainJob:
    base: dict[str, Any] = {
        "data": {"name": "digits", "max_train": 120},
        "model": {"name": "linear"},
        "privacy__delta": DELTA,
        "privacy__noise_multiplier": NOISE,
        "privacy__run_key": None,
        "training__batch_size": 12,
        "training__steps": STEPS,
        "resources__checkpoint_seconds": 1e9,
    }
    return prepare_job(tmp, **(base | changes))


def exact(*parts: tuple[int, float, float]) -> float:
    """Epsilon at DELTA of (steps, rate, noise multiplier) parts, by dp-accounting."""
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for steps, rate, noise in parts:
        inner = dpa.GaussianDpEvent(noise)
        accountant.compose(dpa.PoissonSampledDpEvent(rate, inner), steps)
    return accountant.get_epsilon(DELTA)


def stated(folder: RunFolder) -> list[float]:
    """The epsilon of the facts and of the summary's line; the page shows the same line."""
    facts = load_results(folder)
    line = dict(facts.summary())["privacy"]
    write_report(folder)
    assert line.partition(" at δ")[0] in folder.report_file.read_text()
    return [facts.guarantee.epsilon, float(line.split()[2])]


def released(folder: RunFolder) -> dict[str, Any]:
    """The card that release writes; its page says the same."""
    write_release(folder)
    card = json.loads((folder.release_folder / "privacy_card.json").read_text())
    shown = format_epsilon(card["guarantee"]["epsilon"])
    assert f"({shown}, " in (folder.release_folder / "privacy_card.md").read_text()
    verify_release(folder.release_folder)
    return card


def covers(found: list[float], epsilon: float) -> None:
    """None below the exact one (printed to four digits, rounded up), none far above."""
    for value in found:
        assert epsilon * (1 - 1e-6) <= value <= epsilon * 1.02 + 1e-3


def test_an_undisturbed_run(tmp_path):
    job = job_of(tmp_path)
    execute(job)
    covers(stated(job.folder), exact((STEPS, RATE, NOISE)))


def test_superseded_releases_are_in_every_epsilon(tmp_path, monkeypatch):
    """6 steps, then all 12 anew with other workers: 18 releases."""
    job = job_of(tmp_path)
    train_and_crash(job.recipe, job.folder, monkeypatch, 5)
    execute(job, 2)
    all_of_it = exact((STEPS + 6, RATE, NOISE))
    covers(stated(job.folder), all_of_it)
    card = released(job.folder)
    covers([card["guarantee"]["epsilon"]], all_of_it)
    at_delta = {row["delta"]: row["epsilon"] for row in card["epsilon_at_delta"]}
    covers([at_delta[DELTA]], all_of_it)
    assert at_delta[1e-6] > at_delta[1e-4] > at_delta[DELTA]
    assert card["reexecuted_releases"] == 6
    assert card["mechanism"][0].startswith("18 Gaussian steps")


def test_superseded_releases_are_in_what_a_later_run_states_of_an_unfinished_one(
    tmp_path, monkeypatch
):
    """4 of the first 6 steps were already repeated with other workers."""
    job = job_of(tmp_path)
    train_and_crash(job.recipe, job.folder, monkeypatch, 5)
    train_and_crash(job.recipe, job.folder, monkeypatch, 3, workers=2)
    assert Ledger.read(job.folder.ledger).num_superseded == 4
    stage = read_stage(job.folder)
    whole = exact((STEPS + 4, RATE, NOISE))
    covers([float(stage.guarantee["epsilon"])], whole)
    covers([PrivacyPlan.from_dict(stage.plan).guarantee().epsilon], whole)


def test_an_exact_replay_is_charged_once(tmp_path, monkeypatch):
    job = job_of(tmp_path)
    for at in (3, 8):
        train_and_crash(job.recipe, job.folder, monkeypatch, at)
    execute(job)
    covers(stated(job.folder), exact((STEPS, RATE, NOISE)))


class TwoPhases(Method):
    """Half of the steps with little noise, half with much."""

    def cost(self, steps: GaussianSteps) -> tuple[Phase, ...]:
        return (GaussianSteps(6, DEAR, RATE), GaussianSteps(6, CHEAP, RATE))


def test_superseded_steps_are_charged_at_the_noise_of_their_phase(tmp_path, monkeypatch):
    """Two phases; what was superseded lies in the first, the dear one."""
    job = job_of(tmp_path, method=f"{__name__}:TwoPhases")
    assert len(job.plan.phases) == 2
    execute(job, until=4)
    execute(job, 2)  # goes on from the checkpoint of step 4
    assert Ledger.read(job.folder.ledger).num_superseded == 0
    covers(stated(job.folder), exact((6, RATE, DEAR), (6, RATE, CHEAP)))

    other = job_of(tmp_path / "other", method=f"{__name__}:TwoPhases")
    train_and_crash(other.recipe, other.folder, monkeypatch, 4)
    execute(other, 2)
    assert Ledger.read(other.folder.ledger).num_superseded == 5
    covers(stated(other.folder), exact((11, RATE, DEAR), (6, RATE, CHEAP)))


def test_the_budget_of_a_data_set_counts_them_too(tmp_path, monkeypatch):
    job = job_of(tmp_path, privacy__budget=str(tmp_path / "budget"))
    with trainer._budget_charged(job):
        train_and_crash(job.recipe, job.folder, monkeypatch, 5)
        execute(job, 2)
    (budget,) = read_budgets(tmp_path / "budget")
    assert sum(p.steps for p in budget.charges[0].phases) == STEPS + 6
    facts = load_results(job.folder)
    assert facts.data_set_guarantee is not None
    assert facts.data_set_guarantee.epsilon >= exact((STEPS + 6, RATE, NOISE)) * (1 - 1e-6)


def test_a_continued_run_reserves_what_it_released_twice(tmp_path, monkeypatch):
    """Before it goes on: a ceiling below plan and repeated steps must refuse it then."""
    job = job_of(tmp_path, privacy__budget=str(tmp_path / "budget"))
    for workers in (1, 2):  # another number of them repeats the steps
        with trainer._budget_charged(job):
            train_and_crash(job.recipe, job.folder, monkeypatch, 5, workers)
    twice = read_verified_ledger(job.folder).ledger.num_superseded
    assert twice == 6
    (budget,) = read_budgets(tmp_path / "budget")  # as it stands until somebody goes on
    assert sum(phase.steps for phase in budget.charges[0].phases) == STEPS + twice
    asked: list[int] = []
    reserve = trainer.charging.reserve_charge

    def look(recipe: Any, records: Any, charge: Any, *rest: Any, **more: Any) -> None:
        asked.append(sum(phase.steps for phase in charge.phases))
        reserve(recipe, records, charge, *rest, **more)

    monkeypatch.setattr(trainer.charging, "reserve_charge", look)
    with trainer._budget_charged(job):
        execute(job, 2)
    assert asked[0] == STEPS + twice


def test_a_fixed_key_is_not_forgotten_when_the_recipe_is_edited(tmp_path):
    job = job_of(tmp_path, privacy__run_key="5a" * 32)
    execute(job)
    folder = job.folder
    kept = folder.recipe_file.read_text()
    raw = yaml.safe_load(kept)
    assert raw["privacy"].pop("run_key") == "5a" * 32
    folder.recipe_file.write_text(yaml.safe_dump(raw))
    with pytest.raises(UserError):
        load_results(folder)
    folder.recipe_file.write_text(kept)
    facts = load_results(folder)
    assert facts.privacy_statement.startswith("NOT PRIVATE: fixed run key")
    assert facts.privacy_card()["private"] is False
    with pytest.raises(UserError):
        write_release(folder)
    assert not folder.release_folder.exists()
    write_release(folder, not_private=True)
    assert "NOT private" in (folder.release_folder / "privacy_card.md").read_text()


def test_a_marked_key_is_fixed_whatever_the_recipe_says(tmp_path):
    job = job_of(tmp_path, privacy__run_key=None)
    execute(job)
    assert load_results(job.folder).privacy_card()["private"] is True
    job.folder.fixed_key_marker.touch()
    assert load_results(job.folder).privacy_card()["private"] is False


def test_a_run_without_noise_proves_nothing(tmp_path):
    job = job_of(tmp_path, privacy={"noise_multiplier": 0, "clipping": "none", "delta": DELTA})
    execute(job)
    facts = load_results(job.folder)
    assert math.isinf(facts.guarantee.epsilon) and not facts.privacy_card()["private"]
    assert facts.privacy_statement.startswith("NOT PRIVATE: epsilon is infinite")
    with pytest.raises(UserError):
        write_release(job.folder)


def test_what_is_released_is_what_was_trained_and_measured(tmp_path):
    job = job_of(tmp_path, training__ema=0.9)
    execute(job)
    folder = job.folder
    evaluate_stage(job.recipe, folder)
    write_release(folder)
    for name in ("model.safetensors", "model.json"):
        made = (folder.model_folder / name).read_bytes()
        assert (folder.release_folder / name).read_bytes() == made
    dataset, model = load_test_records(job.recipe, job.source), load_model(job.recipe, folder)
    right = 0
    for i in range(len(dataset)):
        with torch.no_grad():
            answer = model(dataset.batch(slice(i, i + 1))).argmax(1)
        right += int((answer == dataset.targets(slice(i, i + 1))).sum())
    told = json.loads(folder.evaluation.read_text())
    assert (told["correct"], told["inputs"]) == (right, len(dataset))
    assert told["accuracy"] == right / len(dataset)
    said = dict(load_results(folder).summary())["test accuracy"]
    assert said.startswith(f"{100 * right / len(dataset):.1f} %")
