"""Many trainings at once are the loop's trainings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.local_execution import command, run_without_ray
from support.training import KEY, make, parameters, train

from dpdist.audits import trainings as vectorized
from dpdist.audits.canaries import audit_many_runs, evaluate_trials, simulate_trials
from dpdist.audits.target import Target, target_of_recipe
from dpdist.audits.trainings import Trainer, TrainerSetup, VectorizedTrainings
from dpdist.config.sections import ManyRunsAudit
from dpdist.core.errors import UserError
from dpdist.gradients.noise import add_noise as real
from dpdist.privacy.audit_bounds import (
    CanaryScores,
    ThresholdCounts,
    group_tradeoff,
    largest_rejected_epsilon,
    log_likelihood_ratio,
    plan_tradeoff,
)
from dpdist.privacy.mechanisms import gaussian_epsilon
from dpdist.privacy.plan import PrivacyPlan
from dpdist.randomness.keys import derive_key
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder
from dpdist.training.job import prepare
from dpdist.training.records import data_source, records_with_canaries

SEED = "5b" * 32


def test_one_of_many_is_the_loops_training(tmp_path: Path) -> None:
    """The same keys give the same batches and noise; gradients agree up to rounding."""
    recipe, folder = make(
        tmp_path, model="linear", privacy__clipping="automatic", training__ema=0.9,
        training__steps=8,
    )  # fmt: skip
    job = prepare(recipe, folder, "test")
    dataset = records_with_canaries(recipe, data_source(recipe))
    key = derive_key(
        bytes.fromhex(KEY), "run", job.plan.fingerprint(), dataset.fingerprint, "trial", 0
    )
    trainings = VectorizedTrainings(recipe, job.plan, dataset)
    others = [derive_key(key, "other"), key, derive_key(key, "another")]
    flat, _ = trainings.run(others, "0/", [0, 0, 0])
    train(recipe, folder)
    alone = parameters(folder)
    found = torch.cat([flat[1][640:], flat[1][:640]])  # files are sorted by name: bias, weight
    assert torch.allclose(found, alone, atol=2e-6)
    assert (flat[0] - flat[1]).abs().max() > 0.01


def target_of(tmp_path: Path, **more: Any) -> Target:
    recipe, _ = make(
        tmp_path, data__max_train=120, privacy__run_key=None,
        **({"model": "linear", "training__batch_size": 60, "training__steps": 4} | more),
    )  # fmt: skip
    return target_of_recipe(recipe, "test")


def quiet(done: int, total: int) -> None:
    pass


@pytest.mark.slow
def test_a_gradient_seen_at_every_step_is_nearly_all_of_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of full batches the sums are Gaussian: mu = sqrt(steps) / sigma, and no audit finds more."""
    run_without_ray(monkeypatch)
    target = target_of(tmp_path, training__batch_size=108, privacy__noise_multiplier=2.0)
    options = ManyRunsAudit(trainings=400, canary="gradient", seed=SEED)
    found = audit_many_runs(options, target, tmp_path / "audit", quiet)
    truth = gaussian_epsilon(target.plan.delta, 1.0, math.sqrt(4) / 2.0)
    assert 0 < found.epsilon <= found.proved == pytest.approx(truth, rel=1e-3)
    assert found.details["epsilon_by_counting"] < found.epsilon and not found.exceeds_proved
    # 200 and 200 are counted: each rate is known to .06, mu to .35 or so.
    assert 0.2 * truth < found.epsilon < truth > found.details["if_gaussian"] > 0.2 * truth
    # Noise that was forgotten in the steps is found.
    monkeypatch.setattr(vectorized, "add_noise", lambda total, key, std: real(total, key, std / 4))
    fewer = options.model_copy(update={"trainings": 200})
    assert audit_many_runs(fewer, target, tmp_path / "less", quiet).exceeds_proved


def test_the_records_part_of_a_sum_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of a sum without noise is the canary alone, wherever records move it."""
    monkeypatch.setattr(vectorized, "add_noise", lambda total, key, std: total)
    target = target_of(tmp_path)
    trainings = VectorizedTrainings(
        target.recipe, target.plan, records_with_canaries(target.recipe, data_source(target.recipe))
    )
    keys = [bytes([number]) * 32 for number in range(8)]
    bias = 640
    flat, scores = trainings.run(keys, "audit", [0, 1] * 4, coordinate=bias)
    assert (flat[::2, bias] - trainings.initial[bias]).abs().min() > 1e-4
    step_plan, steps = target.plan.step(0), target.plan.steps
    absent, joined = log_likelihood_ratio(
        [0.0, 1.0], step_plan.noise_multiplier, step_plan.sample_rate
    )
    assert scores[::2] == pytest.approx(steps * absent)
    times = (scores[1::2] - steps * absent) / (joined - absent)
    assert times == pytest.approx(np.round(times), abs=1e-6) and 4 < times.sum() < 13


def test_each_training_has_a_key_of_its_own(tmp_path: Path) -> None:
    target = target_of(tmp_path)
    records = records_with_canaries(target.recipe, data_source(target.recipe))
    setup = TrainerSetup(target.recipe, target.plan, records, bytes(32), 0, True)
    trainer = Trainer(setup)
    whole = [row["score"] for row in trainer(range(4))]
    assert len(set(whole)) == 4  # without a copy of the canary, only keys tell them apart
    assert [row["score"] for row in trainer(range(2, 4))] == pytest.approx(whole[2:], rel=1e-6)


def test_simulated_sums_are_those_of_the_copies() -> None:
    noise, copies, steps = 2.0, 3, 2
    plan = PrivacyPlan.dp_sgd(
        records=10, batch_size=10, noise_multiplier=noise, steps=steps, delta=1e-5
    )
    inside, outside = simulate_trials(plan, copies).scores_by_canary
    # Of full batches the score of a sum s is (s - 1/2) / noise^2.
    for scores, added in ((inside, copies), (outside, 0)):
        assert scores.mean() == pytest.approx(steps * (added - 0.5) / noise**2, abs=0.03)
        assert scores.std() == pytest.approx(steps**0.5 / noise, rel=0.03)


@pytest.mark.parametrize("copies", [1, 4])
def test_two_statements_about_many_runs_share_the_error(tmp_path: Path, copies: int) -> None:
    target = target_of(tmp_path, training__batch_size=108, training__steps=1)
    rng, present = np.random.default_rng(0), np.arange(400) % 2 == 1
    trials = CanaryScores(np.arange(400), present, rng.normal(3.0 * present))
    options = ManyRunsAudit(trainings=400, copies=copies, audits=2, alpha=0.1)
    found = evaluate_trials(options, target, trials)
    each, delta = 0.1 / 2 / 2, target.plan.delta
    one = plan_tradeoff(target.plan)
    assert one is not None
    promised = group_tradeoff(one, copies)
    runs = ThresholdCounts.from_scores(trials, each, curve=promised)
    assert found.epsilon == largest_rejected_epsilon(runs, target.plan, copies) > 0
    assert found.curve_rejected == runs.rejects(promised) == (copies == 1)
    counted = ThresholdCounts.from_scores(trials, each, delta=delta)
    assert found.details["epsilon_by_counting"] == counted.epsilon(delta, copies) > 0


def test_without_noise_the_model_gives_the_canary_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_ray(monkeypatch)
    noisy = target_of(tmp_path, privacy__noise_multiplier=1.0)
    plan = replace(noisy.plan, phases=(replace(noisy.plan.phases[0], noise_multiplier=0.0),))
    claimed = Target(noisy.recipe, plan, noisy.proved)  # proved for what is not run
    options = ManyRunsAudit(trainings=300, copies=4, seed=SEED)
    found = audit_many_runs(options, claimed, tmp_path / "audit", quiet)
    assert found.view == "the final model" and found.details["copies"] == 4
    # Nearly perfect separation by four copies in 75 and 75: no counting audit tells more.
    assert 0.5 < found.epsilon <= found.details["counting_at_most"] < 1.2


@pytest.mark.parametrize("more", [{"privacy__clipping": "per-layer"}, {"training__flip": True}])
def test_what_is_more_than_gradients_and_noise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    run_without_ray(monkeypatch)
    target = target_of(tmp_path, **more)
    with pytest.raises(UserError, match="method"):
        VectorizedTrainings(
            target.recipe,
            target.plan,
            records_with_canaries(target.recipe, data_source(target.recipe)),
        )


@pytest.mark.slow
def test_the_command_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_without_ray(monkeypatch)
    target = target_of(tmp_path)
    (tmp_path / "x.yaml").write_text(target.recipe.to_yaml())
    asked = ("--kind", "many-runs", "--set", "audit.trainings=20")
    done = command(monkeypatch, capsys, tmp_path, "audit", "x.yaml", *asked)
    assert done.code == 0, done.err
    result = tmp_path / "runs/x.audit/many-runs-input-1/audit.json"
    assert result.is_file() and result.parent.stat().st_mode & 0o077 == 0
    # Of a run: counts of so many models of its records are not covered by its guarantee.
    folder = RunFolder(tmp_path / "runs" / target.recipe.name)
    train(target.recipe, folder)
    done = command(monkeypatch, capsys, tmp_path, "audit", folder.name, *asked)
    assert done.code == 0, done.err
    (kept,) = folder.path.rglob("audit.json")
    assert kept.is_relative_to(folder.private) and not load_results(folder).audits
    output = ("--output", folder.path / "audit/x")
    refused = command(monkeypatch, capsys, tmp_path, "audit", folder.name, *asked, *output)
    assert refused.code == 2 and "audit/x" in refused.err


def test_a_training_that_diverged_says_nothing(tmp_path: Path) -> None:
    target = target_of(
        tmp_path, training__learning_rate=1e9, training__momentum=0.9, training__steps=9,
        model={"name": "mlp", "options": {"hidden": [32] * 4}},
    )  # fmt: skip
    records = records_with_canaries(target.recipe, data_source(target.recipe))
    setup = TrainerSetup(target.recipe, target.plan, records, bytes(32), 1, False)
    rows = Trainer(setup)(range(2))
    assert {row["score"] for row in rows} == {0.0}
