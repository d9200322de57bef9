"""Phases describe themselves: what they did before, and what a new kind needs."""

from __future__ import annotations

import json
import math

import pytest

from dpdist.privacy import phases
from dpdist.privacy.phases import (
    FixedBatches,
    GaussianAnswers,
    GaussianCounts,
    GaussianReleases,
    GaussianScores,
    GaussianSteps,
    NoisyRecords,
    NoisyVotes,
    NonPrivate,
    ParallelParts,
    RepeatAndSelect,
    ScoredTraining,
    TrainedElsewhere,
    WorstOf,
    walk_phases,
)
from dpdist.privacy.plan import PrivacyPlan

STEPS = GaussianSteps(6057, 1.1, 256 / 60_000)
CAPPED = GaussianSteps(30, 0.8, 0.1, 12)
RELEASE = GaussianReleases(20.0, 2, 0.1)
PARTS = ParallelParts(((GaussianSteps(400, 4.0, 200 / 9000),), (GaussianReleases(9.5, 1),)))
OWN_NOISE = WorstOf(((RELEASE, GaussianSteps(400, 4.0, 0.02)),), 1e-9)

# Made by the code as it was before each kind had a class of its own; those with a WorstOf or
# answers or votes later.
FINGERPRINTS = {
    "085e5e11e5993ee2de9b29a2ae83762e124aa217bfba681952401fc496d5a4bb": PrivacyPlan(
        60_000, (STEPS,), 1e-5
    ),
    "15c465a0043ee4178d46dffade89259e77a2297615561dcf8d7452459bb9b484": PrivacyPlan(
        1000, (CAPPED,), 1e-5, 0.5, "replace-one"
    ),
    "07e3c6151d5932ca99287cc3743ce8dd808e3e7ed8105aac7de61ca752ebfcbd": PrivacyPlan(
        100,
        (NonPrivate("r reads private records"), GaussianSteps(3, 0.0, 0.1)),
        1e-3,
        math.inf,
    ),
    "7fa6ee9ccea9a3328ff0046161e5bebd2936cea60ea470e11ea93cf3d5da909e": PrivacyPlan(
        1000, (GaussianSteps(2, 1.0, 1.0), GaussianReleases(3.0)), 1e-5, nominal=True
    ),
    "3e1a43a5ede67cbab2ccb2f4717641a28033d0bf03cc86d91feb757fbb17bcd4": PrivacyPlan(
        9000, (RepeatAndSelect((PARTS,), 5.0, math.inf),), 1e-5
    ),
    "c4390495f236f4a69a3fb9a5a5778ffb08d7a9eedae2597e39a501f23fd95801": PrivacyPlan(
        9000, (RepeatAndSelect((OWN_NOISE,), 3.5, -0.5), GaussianReleases(9.0)), 1e-5
    ),
    "ee4612f4a4935e810cd7809adef3a87a01048926cb0a9478fec4547637f7a704": PrivacyPlan(
        1000, (GaussianAnswers(10.0, 100),), 1e-5, nominal=True
    ),
    "a5864584c429d17aea8c1fd252adcd30c8ef3d3eb14451d2d3ccfc345924201e": PrivacyPlan(
        1000, (FixedBatches(3, 0.1, "one noise for all"),), 1e-5, math.inf, "replace-one"
    ),
    "f17095f57bf0e8b36e8aef49dc1065c01c220c041579a54dc2da470290316859": PrivacyPlan(
        1000, (NoisyRecords(2.0, 1.0, 50, 0.1),), 1e-5, 1.0, "replace-one"
    ),
    "f405565075d7acff3f059d99cb6a94e5635692e50e478e39557f9d998458f3c2": PrivacyPlan(
        1000, (NoisyVotes(1.3, 40, 10, 0.25, 50, 0.1),), 1e-5, math.inf, nominal=True
    ),
    "0c0a59e3eb208d2ec23608d55941e675295b54eff6f46cef45f84e4e427d0ce6": PrivacyPlan(
        1000,
        (ScoredTraining(((GaussianSteps(6, 1.0, 0.2),), (GaussianScores(3.0, 3, records=40),))),),
        1e-5,
    ),
    "d92e2fc53c438fc9433e38d6ab57f6faa10d47d7c0a66eae7fd700e0b43b80fa": PrivacyPlan(
        1000, (TrainedElsewhere(),), 1e-5
    ),
    "a02accee039a5ebc895a17f8891541e31187c61c27fb23070e32dff316a3f81f": PrivacyPlan(
        1000, (GaussianCounts(20.0),), 1e-5
    ),
}


@pytest.mark.parametrize("fingerprint", FINGERPRINTS)
def test_plans_on_disk_keep_their_fingerprint(fingerprint):
    plan = FINGERPRINTS[fingerprint]
    assert plan.fingerprint() == fingerprint
    assert PrivacyPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_each_kind_has_its_form_on_disk():
    found = {
        phase.kind: phase for plan in FINGERPRINTS.values() for phase in walk_phases(plan.phases)
    }
    assert found.keys() == phases.KINDS.keys()
    assert RELEASE.to_dict() == {
        "kind": "gaussian-releases", "noise_multiplier": 20.0, "count": 2, "sample_rate": 0.1,
    }  # fmt: skip
    assert RepeatAndSelect((), 5, math.inf).to_dict() == {
        "kind": "repeat-and-select", "phases": [], "mean": 5, "shape": "inf",
    }  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "votes"},
        {"kind": "gaussian-steps", "steps": 3},
        {"kind": "gaussian-steps", "steps": 3, "noise_multiplier": "1", "sample_rate": 1.0},
        {"kind": "non-private", "reason": "a", "why": "b"},
        {"kind": "parallel-parts", "parts": [[{"kind": "no"}]]},
    ],
)
def test_a_damaged_phase_is_refused(record):
    with pytest.raises(ValueError):
        phases.phase_from_dict(record)


def test_every_step_is_accounted():
    """Full batches, T steps: one Gaussian of sigma / sqrt(T). What no theorem covers: infinity."""
    for steps in (1, 2, 3, 8):
        plan = PrivacyPlan(100, (GaussianSteps(steps, 2.0, 1.0),), 1e-4)
        one = PrivacyPlan(100, (GaussianSteps(1, 2.0 / math.sqrt(steps), 1.0),), 1e-4)
        assert plan.guarantee().epsilon == pytest.approx(one.guarantee().epsilon, rel=1e-3)
    nothing = PrivacyPlan(100, (NonPrivate("looked at"), GaussianSteps(1, 2.0, 1.0)), 1e-4)
    assert math.isinf(nothing.guarantee().epsilon)


def test_what_is_nested_is_said_too():
    nested = PrivacyPlan(9000, (RepeatAndSelect((PARTS,), 5.0, 1.0),), 1e-5).assumptions
    assert "what is released beside the steps is clipped per record as well" in nested
    hidden = RepeatAndSelect((NonPrivate("a leak"),), 2.0, 1.0)
    assert PrivacyPlan(10, (hidden,), 1e-3).unproved_reasons == ["a leak"]


def test_steps_and_releases_repeat_in_one_phase_and_order_themselves():
    assert GaussianSteps(3, 1.0, 0.1).repeat(4) == (GaussianSteps(12, 1.0, 0.1),)
    assert RELEASE.repeat(3) == (GaussianReleases(20.0, 6, 0.1),)
    assert OWN_NOISE.repeat(2) == (OWN_NOISE, OWN_NOISE)
    fewer = GaussianSteps(2, 1.2, 0.05)
    assert fewer.dominated_by(GaussianSteps(3, 1.0, 0.1)) and not STEPS.dominated_by(fewer)
    assert not GaussianSteps(2, 1.2, 0.05, 9).dominated_by(GaussianSteps(3, 1.0, 0.1, 9))
    assert CAPPED.dominated_by(CAPPED) and not CAPPED.dominated_by(RELEASE)


def test_scores_beside_a_training_are_charged_from_the_beginning():
    steps, looks = GaussianSteps(6, 1.0, 0.2), GaussianScores(3.0, 3, records=40)
    scored = ScoredTraining(((steps,), (looks,)))
    plan = PrivacyPlan(1000, (scored,), 1e-5)
    assert plan.steps == 6 and plan.num_queries == 3
    assert plan.step(5) == PrivacyPlan(1000, (steps,), 1e-5).step(5)
    assert plan.executed_phases([0]) == (looks,) and plan.executed_phases([6]) == plan.phases
    assert plan.executed_phases([8])[0].training_steps.steps == 8  # by other attempts, too
    alone = [PrivacyPlan(1000, (each,), 1e-5).guarantee().epsilon for each in (steps, looks)]
    assert plan.guarantee().epsilon == max(alone) and plan.guarantee(0).epsilon == alone[1]
    with pytest.raises(ValueError):
        PrivacyPlan(1000, (scored,), 1e-5, adjacency="replace-one")
    for parts in ((), ((steps,),), ((looks,), (looks,)), ((steps, steps), (looks,))):
        with pytest.raises(ValueError):
            ScoredTraining(parts)
