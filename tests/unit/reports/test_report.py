"""The report: a verdict that is as bad as what is known, and nothing that is secret."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpdist
from dpdist.attacks.settings import CheckSettings
from dpdist.audits.target import AuditResult
from dpdist.core.console import format_markdown_table
from dpdist.evaluation import split_images
from dpdist.privacy.card import AuditFinding
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import Guarantee, format_epsilon
from dpdist.reports.results import RunResults, load_results
from dpdist.reports.summary import (
    accuracy_interval,
    make_verdict,
    max_correct_guess_percent,
)
from dpdist.runs.recipe import parse_recipe


@pytest.fixture(scope="module")
def facts(golden: Any, tmp_path_factory: pytest.TempPathFactory) -> RunResults:
    return load_results(golden("digits", tmp_path_factory.mktemp("runs")))


def audit(**changes: Any) -> AuditFinding:
    given = {
        "kind": "mechanism", "method": "m", "epsilon": 5.0, "delta": 1e-4, "alpha": 0.05,
        "view": "all", "adjacency": "add-or-remove-one", "trials": 10, "rule": "r",
        "proved": math.inf, "claimed": 1.0,
    }  # fmt: skip
    return AuditFinding(**(given | changes))


def test_what_is_secret_stays_secret_and_canaries_show_no_test_input(
    golden: Any, tmp_path: Path
) -> None:
    run = golden("release", tmp_path)
    text = run.report_file.read_text()
    assert run.run_key.read_text().strip() not in text
    for mark in re.findall(r"[0-9a-f]{32,}", run.data_fingerprint.read_text()):
        assert mark not in text
    audit = {"kind": "canaries", "canaries": 20}
    recipe = parse_recipe({**run.read_recipe().model_dump(mode="json"), "audit": audit}, "test")
    assert recipe.canary_audit is not None and "canaries" in str(split_images(recipe))


def test_the_card_of_a_release_states_the_rows_of_its_run(golden: Any, tmp_path: Path) -> None:
    run = golden("release", tmp_path)
    stated = dpdist.load(run.release_folder).rows
    assert format_markdown_table(stated) in (run.release_folder / "README.md").read_text()
    names = ("privacy", "certified accuracy")
    same = [row for row in load_results(run).rows() if row.name in names]
    assert len(same) == 2 and all(row in stated for row in same)


def with_results(facts: RunResults, kind: type, result: Any) -> RunResults:
    return dataclasses.replace(facts, evaluations={**facts.evaluations, kind: [result]})


def test_the_verdict_is_as_bad_as_the_worst_that_is_known(
    facts: RunResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunResults, "has_fixed_key", False)
    told, epsilon = make_verdict(facts), facts.guarantee.epsilon
    assert told.severity == ("caution" if epsilon > 10 else "good")
    assert format_epsilon(epsilon) in told.sentence
    assert f"{100 * facts.tables[0].certified_accuracy(0.125):.1f} % of 20." in told.sentence
    table = facts.tables[0]
    unsure = dataclasses.replace(table, prediction=np.full_like(table.prediction, -1))
    for tables, number in (
        ([table, unsure], 0),
        ([unsure, dataclasses.replace(unsure)], 1),
    ):
        doubted = make_verdict(dataclasses.replace(facts, tables=tables))
        assert doubted.severity == "caution" and table.title in doubted.sentence
        assert doubted.sentence.count("abstained on all") == number
    infinite = Guarantee(math.inf, 1e-4, "add-or-remove-one", "proved", "none")
    account = dataclasses.replace(facts.account, guarantee=infinite)
    for bad in (
        dataclasses.replace(facts, account=account),
        with_results(facts, AuditResult, audit(proved=1.0)),
        with_results(facts, CheckSettings, {"plausible": False}),
    ):
        assert make_verdict(bad).severity == "bad"
    claimed = Guarantee(1.0, 1e-4, "add-or-remove-one", "claimed", "Theorem 1")
    claim = Claim("X", "here", None, claimed, facts.guarantee, "not sound", "no proof")
    monkeypatch.setattr(RunResults, "claim", claim)
    assert make_verdict(facts).severity == "caution"
    refuted = make_verdict(with_results(facts, AuditResult, audit()))
    assert refuted.severity != "good" and "refuted" in refuted.sentence
    monkeypatch.setattr(RunResults, "has_fixed_key", True)
    assert make_verdict(facts).severity == "bad"


def test_the_verdict_on_a_rare_class_names_the_ranking(facts):
    found = {"correct": 90, "inputs": 100, "by_class": [[90, 90], [10, 0]]}
    for metrics, named in (({}, False), ({"AUC": [0.8, 0.7, 0.9]}, True), ({"AUC": [0.5]}, False)):
        rare = dataclasses.replace(facts, evaluation={**found, "metrics": metrics})
        sentence = make_verdict(rare).sentence
        assert "commonest class, 90.0 %" in sentence and ("AUC 0.800" in sentence) == named


def test_what_epsilon_lets_a_guess_be_right() -> None:
    def at(epsilon: float, delta: float) -> float:
        return float(
            max_correct_guess_percent(
                Guarantee(epsilon, delta, "add-or-remove-one", "proved", "none")
            )
        )

    assert at(0.0, 0.0) == 50 and at(math.log(3), 0.0) == pytest.approx(75, abs=0.011)
    assert at(3.0, 1e-4) >= 100 * (math.exp(3) + 1e-4) / (1 + math.exp(3)) > at(3.0, 1e-4) - 0.01
    assert at(1.0, 0.01) >= 100 * (math.e + 0.01) / (1 + math.e) > at(1.0, 0.01) - 0.01
    assert at(800.0, 1e-4) == 100
    low, high = map(float, accuracy_interval(90, 100).split(" to "))
    assert low < 83 < 90 < 95 < high


OPEN = "Not part of this run: to be written by the provider."


def test_it_has_the_points_of_both_regulations_and_states_what_the_report_states(
    golden, tmp_path, dpdist_without_ray
):
    folder = golden("release", tmp_path / "runs")
    done = dpdist_without_ray("report", "x", "--technical-file")
    assert done.code == 0, done.err
    page = (folder.path / "report" / "technical-file.md").read_text()
    parts = re.split(r"^### (.+)$", page, flags=re.MULTILINE)[1:]
    assert [heading.split()[0] for heading in parts[::2]] == [
        *(f"{number}." for number in range(1, 10)), *(f"({letter})" for letter in "abcd"),
    ]  # fmt: skip
    letters = [re.findall(r"\*\*\(([a-h])\)", text) for text in parts[1::2]]
    assert letters[:3] == [list("abcdefgh"), list("abcdefgh"), []]
    assert all(OPEN in text for text in parts[1::2])
    facts = dpdist.load_results(folder)
    card = facts.privacy_card()
    for line in (*card["mechanism"], *card["assumptions"], *card["notes"]):
        assert f"* {line}\n" in page
    for secret in (str(tmp_path), folder.read_run_key().hex()):
        assert secret not in page
