"""dpdist audit: of a recipe and of a run, its result in report, card and comparison."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest

from dpdist.audits import mechanism
from dpdist.audits.target import Target
from dpdist.config.sections import MechanismAudit
from dpdist.privacy.audit_bounds import ThresholdCounts
from dpdist.privacy.card import CONSISTENT, EXCEEDS_PROVED, REFUTED, AuditFinding
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import Guarantee
from dpdist.privacy.plan import PrivacyPlan
from dpdist.reports import compare, results
from dpdist.reports.results import RunResults, load_results
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import find_recipe, load_recipe
from dpdist.training.private_step import PrivateStep

FEW = ("--set", "audit.releases=400", "--set", "audit.workers=1")


@pytest.fixture(autouse=True)
def one_scene(monkeypatch):
    """All scenes are played where the zoo is tested."""
    monkeypatch.setattr(
        mechanism,
        "run_scenarios",
        functools.partial(mechanism.run_scenarios, scenarios=["canaries"]),
    )


@pytest.fixture
def run(golden, tmp_path: Path):
    return golden("release", tmp_path / "runs")


@pytest.mark.slow
def test_of_a_run(run, dpdist, monkeypatch):
    done = dpdist("audit", "x", "--runs", run.path.parent, *FEW)
    assert done.code == 0, done.err
    assert "consistent" in done.out
    facts = load_results(run)
    (audited,) = facts.audits
    assert audited.path == run.path / "audit" / "mechanism" / "audit.json"
    assert 0 < audited.epsilon < audited.proved == facts.guarantee.epsilon
    assert ("audited, mechanism", audited.summary_line) in facts.summary()
    assert any(audited.summary_line in note for note in facts.privacy_card()["notes"])
    header, row = compare.privacy_rows([facts])
    assert row[header.index("audited epsilon")] == audited.table_cell

    # A fault in the code that trains: the exit code says so.
    real = PrivateStep.release
    monkeypatch.setattr(
        PrivateStep, "release", lambda self, step, rows, std, flag=False:
        real(self, step, rows, std / 3, flag),
    )  # fmt: skip
    done = dpdist("audit", "x", "--runs", run.path.parent, *FEW, "--set", "audit.seed=1")
    assert done.code == 1


def test_audits_of_one_recipe_share_the_error(tmp_path):
    recipe = load_recipe(find_recipe("digits"))
    options = MechanismAudit(releases=400, workers=1, alpha=0.1, audits=2)
    plan = PrivacyPlan.dp_sgd(records=900, batch_size=9, noise_multiplier=1.0, steps=1, delta=1e-5)
    target = Target(recipe, plan, plan.guarantee())
    found = mechanism.audit_mechanism(options, target, tmp_path, lambda done, total: None)
    (counts,) = found.details["scenes"].values()
    each = 0.05 / len(mechanism.SCENARIOS)
    rates = ThresholdCounts(*counts.values(), each)  # type: ignore[arg-type]
    assert found.alpha == 0.05 and found.details["copies"] == 2 and not found.curve_rejected
    assert 1 / rates.mu(found.details["copies"]) == found.details["noise_multiplier_at_most"]


@pytest.mark.slow
def test_proved_is_of_the_search_that_chose_a_run(run, dpdist, monkeypatch):
    def searched(folder: RunFolder) -> RunResults:
        found = load_results(folder)
        larger = replace(found.guarantee, epsilon=99.0)
        return replace(found, account=replace(found.account, guarantee=larger))

    monkeypatch.setattr(results, "load_results", searched)
    assert dpdist("audit", "x", "--runs", run.path.parent, *FEW).code == 0
    assert load_results(run).audits[0].proved == 99.0


def test_a_claim_of_other_data_sets_or_at_a_larger_delta_is_not_refuted(monkeypatch):
    recipe = load_recipe(find_recipe("digits"))
    for delta, adjacency, claimed in (
        (1e-6, "add-or-remove-one", 0.1), (1e-5, "add-or-remove-one", 0.1),
        (1e-4, "add-or-remove-one", None), (1e-5, "replace-one", None),
    ):  # fmt: skip
        own = Guarantee(0.1, delta, adjacency, "claimed", "a paper")
        claim = Claim("paper", "", None, own, own, "not sound", "")
        monkeypatch.setattr(type(recipe.method), "claim", lambda *_, claim=claim: claim)
        plan = PrivacyPlan.dp_sgd(
            records=100, batch_size=10, noise_multiplier=1.0, steps=10, delta=1e-5
        )
        assert Target(recipe, plan, plan.guarantee()).claimed_epsilon == claimed


@pytest.mark.slow
def test_what_stays_private_is_not_written_among_public_files(dpdist, tmp_path):
    """Nor into another run's folder, whatever is audited."""
    other = tmp_path / "other"
    (other / "private").mkdir(parents=True)
    (other / "run.json").write_text("{}")
    for output in (other, other / "audit", other / "private" / ".." / "audit"):
        words = ("audit", "digits", "--kind", "many-runs", "--runs", tmp_path / "runs")
        done = dpdist(*words, "--output", output)
        assert done.code == 2, done.err
    assert {path.name for path in other.rglob("*")} == {"private", "run.json"}


FOUND = AuditFinding(
    kind="mechanism", method="by a theorem", epsilon=1.23456, delta=1e-5, alpha=0.05,
    view="single releases", adjacency="add-or-remove-one", trials=2000, rule="above 1",
    proved=2.0, assumptions=("it is Gaussian",), details={"sigma": 1.0},
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, CONSISTENT),
        ({"epsilon": 2.1}, EXCEEDS_PROVED),
        ({"curve_rejected": True}, EXCEEDS_PROVED),
        ({"claimed": 1.0}, REFUTED),
        ({"claimed": 1.0, "epsilon": 2.1}, EXCEEDS_PROVED),
        ({"claimed": 1.0, "proved": math.inf}, REFUTED),
        ({"exploratory": True, "epsilon": 9.0, "curve_rejected": True, "claimed": 1}, CONSISTENT),
    ],
)
def test_the_verdict(tmp_path, changes, verdict):
    audited = dataclasses.replace(FOUND, **changes)
    assert audited.verdict == verdict and audited.exceeds_proved == (verdict == EXCEEDS_PROVED)
    assert verdict in audited.summary_line or audited.exploratory
    assert (audited.meaning == FOUND.meaning) == (verdict == CONSISTENT and not audited.exploratory)
    audited.write(tmp_path / "a" / "audit.json")
    back = AuditFinding.read(tmp_path / "a" / "audit.json")
    assert dataclasses.replace(back, path=None) == audited


def test_a_lower_bound_is_rounded_down():
    assert "epsilon >= 1.234 at delta = 1e-05, confidence 95 %" in FOUND.summary_line
    assert FOUND.table_cell == ">= 1.234 (mechanism)"
    assert "no statement" in dataclasses.replace(FOUND, exploratory=True).summary_line
