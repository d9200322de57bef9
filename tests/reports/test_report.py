"""The report, as a browser and a reader meet it: well formed, whole, honest, of one file."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
from support.training import make, train

from dpdist import pipeline
from dpdist.attacks.settings import CheckSettings
from dpdist.audits.target import AuditResult
from dpdist.certification import table as tables
from dpdist.certification.cohen import Cohen
from dpdist.core.errors import UserError
from dpdist.evaluation import split_images
from dpdist.privacy.card import AuditFinding
from dpdist.privacy.claims import Claim
from dpdist.privacy.guarantee import Guarantee, format_epsilon
from dpdist.reports.charts import (
    certified_accuracy_chart,
)
from dpdist.reports.html import (
    write_report,
)
from dpdist.reports.results import RunResults, load_results
from dpdist.reports.summary import (
    accuracy_interval,
    make_verdict,
    max_correct_guess_percent,
)
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe
from dpdist.training.records import data_source, load_test_records

HOSTILE = "<img src=x onerror=alert(1)> & 'more'"
NAMES = [*"abcdefgh", "<i>", "j"]  # of the classes
WRONG, ABSTAINS, INPUTS = {4, 9, 14}, {6, 13}, 30


def certify(run: RunFolder, name: str = "mine", data: str | None = None) -> None:
    """Certificates of the first test inputs, ever less sure; some wrong, some not answered."""
    recipe = run.read_recipe()
    test = load_test_records(recipe, data_source(recipe))
    settings, rows = Cohen(sigma=0.5, n=1000, radii=(0.1, 0.25)), []
    for index in range(INPUTS):
        label = int(test.labels[index])
        selected = (label + 1) % 10 if index in WRONG else label
        hits = 500 if index in ABSTAINS else 995 - 10 * index
        counts = [0] * 10
        counts[selected], counts[(selected + 5) % 10] = hits, 1000 - hits
        verdict = settings.decide(
            [{"selected": selected, "histogram": counts}], settings.build_sampler(None, ())
        )
        rows.append(settings.table_row(index, label, verdict, None))
    about = {
        "settings": {"n": 1000, "mode": "fixed", "noise": "gaussian", "sigma": 0.5,
                     "radii": [0.1, 0.25]},
        "model": load_results(run).training_summary["model"], "data": data or test.fingerprint,
        "seed": "5eed",
    }  # fmt: skip
    tables.write(tables.build(rows, about), run.certificates / name / "certificates.parquet")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    recipe, run = make(
        tmp_path_factory.mktemp("runs"), HOSTILE, data__max_train=40, training__batch_size=40,
        training__steps=3, model="linear", privacy__run_key=None, data__names=NAMES,
    )  # fmt: skip
    train(recipe, run)
    pipeline.evaluate_stage(recipe, run)
    certify(run)
    pipeline.report_stage(run)
    return run


@pytest.fixture(scope="module")
def facts(run: RunFolder) -> RunResults:
    return load_results(run)


@pytest.mark.slow
def test_what_is_secret_stays_secret(run: RunFolder) -> None:
    text = run.report_file.read_text()
    assert run.run_key.read_text().strip() not in text
    for mark in re.findall(r"[0-9a-f]{32,}", run.data_fingerprint.read_text()):
        assert mark not in text


def test_a_run_with_canaries_shows_no_test_input(run: RunFolder) -> None:
    recipe = run.read_recipe()
    audit = {"kind": "canaries", "canaries": 20}
    planted = parse_recipe({**recipe.model_dump(mode="json"), "audit": audit}, "test")
    assert planted.canary_audit is not None and "canaries" in str(split_images(planted))


def audit(**changes: Any) -> AuditFinding:
    given = {
        "kind": "mechanism", "method": "m", "epsilon": 5.0, "delta": 1e-4, "alpha": 0.05,
        "view": "all", "adjacency": "add-or-remove-one", "trials": 10, "rule": "r",
        "proved": math.inf, "claimed": 1.0,
    }  # fmt: skip
    return AuditFinding(**(given | changes))


def with_results(facts: RunResults, kind: type, result: Any) -> RunResults:
    return dataclasses.replace(facts, evaluations={**facts.evaluations, kind: [result]})


def test_the_verdict_is_as_bad_as_the_worst_that_is_known(
    facts: RunResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = facts.evaluation  # three steps may have taught it no more than the commonest class
    right = {"correct": 300, "accuracy": 300 / about["inputs"]}
    facts = dataclasses.replace(facts, evaluation=about | right)
    told, epsilon = make_verdict(facts), facts.guarantee.epsilon
    assert told.severity == ("caution" if epsilon > 10 else "good")
    assert format_epsilon(epsilon) in told.sentence
    assert f"{100 * facts.tables[0].certified_accuracy(0.1):.1f} % of 30." in told.sentence
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


def test_a_chart_never_shows_more_than_is_certified(facts: RunResults) -> None:
    """Also where there are more radii than it has places for."""
    radii = np.linspace(0.001, 2.0, 1000)
    table = dataclasses.replace(
        facts.tables[0], radius=radii, index=np.arange(1000), label=np.zeros(1000, int),
        prediction=np.zeros(1000, int),
    )  # fmt: skip
    drawn = certified_accuracy_chart([table], None)
    (path,) = re.findall(r'd="([^"]+)"[^>]+style="fill: none; stroke: #0b5cad', drawn)[:1]
    assert len(drawn) < 40_000
    points = np.array(re.findall(r"[ML] ([\d.]+) ([\d.]+)", path), float)
    (left, top), (_, bottom) = points[0], points[-1]
    right = points[-1][0]  # where the largest radius is
    for before, after in itertools.pairwise(points):
        radius = (after[0] - left) / (right - left) * 2.0
        share = (bottom - after[1]) / (bottom - top)
        assert after[0] == before[0] or share <= np.mean(radii >= radius - 0.01) + 0.005


def test_a_report_that_fails_leaves_the_one_before(run: RunFolder, monkeypatch) -> None:
    """Page and pictures are of one report: what is refused late replaced nothing."""
    before = {path: path.read_bytes() for path in run.report_file.parent.iterdir()}
    assert len(before) > 1
    table = run.certificates / "mine/certificates.parquet"
    whole = table.read_bytes()

    def refused(facts: RunResults) -> None:
        raise UserError("refused late")

    monkeypatch.setattr("dpdist.reports.html.compare_with_baseline", refused)
    certify(run, data="0" * 32)
    monkeypatch.setattr("dpdist.reports.charts.chart", lambda *_, **__: "another picture")
    try:
        with pytest.raises(UserError, match="refused late"):
            write_report(run)
        assert {path: path.read_bytes() for path in run.report_file.parent.iterdir()} == before
    finally:
        table.write_bytes(whole)
