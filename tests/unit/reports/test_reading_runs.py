"""One reader: command, report, comparison and attacks state the same of one table."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpdist.attacks import table as attack_tables
from dpdist.attacks.table import OutcomeShares, read_attack
from dpdist.certification import table as tables
from dpdist.certification import table_reader
from dpdist.certification.cohen import Cohen
from dpdist.certification.expected_scores import ExpectedScores, ScoreBound, certify_scores
from dpdist.certification.score_bounds import SCORE_UNIT, Sensitivity
from dpdist.certification.worker import ScoreSampler
from dpdist.cli import certify
from dpdist.cluster import job_folder
from dpdist.core.errors import UserError
from dpdist.reports import compare, html
from dpdist.reports.charts import attack_outcome_table, is_same_classifier
from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder

N = 1000
NORMS = Sensitivity(1.0, 2.0, 0.01)


def score_table(path: Path, bound: ScoreBound, labels: list[int]) -> Path:
    """Class 1 has the larger mean score (0.7), class 0 wins nearly every vote."""
    settings = ExpectedScores(n=N, alpha=0.05, bound=bound, radii=(0.01,))
    sums, votes = np.array([300, 700]) * SCORE_UNIT, np.array([990, 10])
    verdict = certify_scores(sums, sums // 2, votes, 0, settings, 1.0, NORMS)
    place = ScoreSampler(1.0, NORMS)
    rows = [settings.table_row(i, label, verdict, place) for i, label in enumerate(labels)]
    about = {
        "settings": {"n": N, "n0": settings.n0, "alpha": settings.alpha, "mode": "scores",
                     "bound": bound, "radii": [0.01]},
        "model": "m", "data": "d", "sensitivity": asdict(NORMS), "seed": "s",
        "classifier": {"backend": "eager", "batch": 100, "notes": []},
    }  # fmt: skip
    tables.write(tables.build(rows, about, settings.table_schema()), path)
    return path


def smoothed_table(path: Path, changes: dict[str, Any] | None = None) -> Path:
    """Three right of four; noise, sigma and data as `changes` say."""
    changed = {"noise": "gaussian", "sigma": 0.5, "data": "d", "model": "m"} | (changes or {})
    kind = changed.get("kind", Cohen)
    settings: Any = kind(sigma=changed["sigma"], n=N, noise=changed["noise"])
    verdict = settings.decide(
        [{"selected": 0, "histogram": [N - 5, 5]}], settings.build_sampler(None, ())
    )
    rows = [settings.table_row(i, i // 3, verdict, None) for i in range(4)]
    about = {
        "settings": {
            "n": N, "mode": settings.mode, "noise": settings.noise, "sigma": settings.sigma,
        },
        "model": changed["model"], "data": changed["data"], "seed": "s",
    }  # fmt: skip
    tables.write(tables.build(rows, about), path)
    return path


def run_of(folder: Path, found: list[table_reader.CertificateTable]) -> Any:
    run = RunFolder(folder)
    return SimpleNamespace(folder=run, tables=found, input_shape=(4,))


@pytest.mark.parametrize(("bound", "right"), [("counts", [0, 0, 0]), ("hoeffding", [1, 1, 1])])
def test_every_page_prints_the_same_certified_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bound: ScoreBound, right: list[int]
) -> None:
    # By counts class 0 is certified, by mean scores class 1: who reads one by the other's rule
    # prints 0 for 100 % and 100 for 0 %.
    path = score_table(tmp_path / "t" / "certificates.parquet", bound, [*right, 1 - right[0]])
    found = table_reader.read(path)
    assert found.certified_accuracy(0.01) == 0.75
    assert (found.size_if_correct() >= 0.01).tolist() == [True, True, True, False]
    certify._print_table("run", table_reader.read(path), [], False)
    lines = capsys.readouterr().out.splitlines()
    shown = {" ".join(line.split()) for line in lines}
    for norm, sign in (("L2", "ℓ2"), ("Linf", "ℓ∞")):
        assert f"{norm} exact 75.0 % at r=0 75.0 % at r=0.01 ({sign}, σ=1)" in shown, shown
    facts = run_of(tmp_path / "run", [found])
    for norm in ("l2", "linf"):
        rows = {
            row[1]: row[4] for row in compare.certified_accuracy_rows([facts], norm, [0.01])[1:]
        }
        assert rows["exact profile"] == "75.0"
        # The vote's class is 0, that of the printed bounds 1, whatever the sound bounds are.
        assert rows["vote (Cohen)"] == ("75.0" if right[0] == 0 else "25.0")
    assert rows["as printed (does not hold)"] == ("75.0" if right[0] == 1 else "25.0")
    section = html._certificate_section(found, RunFolder(tmp_path))
    assert ("0.01", "75.00") in {row[:2] for row in section["rows"]}  # type: ignore[attr-defined]


def attacks(
    path: Path, noise: dict[str, Any], predictions: dict[tuple[str, float], Any], **more: Any
) -> Path:
    n = 1 if noise["kind"] == "none" else 100
    rows = [
        {"attack": name, "size": size, "index": i, "label": i // 3, "distance": 0.0,
         "prediction": p, "hits": (n // 2 if n > 1 else 0) if p < 0 else n, "n": n}
        for (name, size), found in sorted(predictions.items())
        for i, p in enumerate(found)
    ]  # fmt: skip
    about = {
        "settings": {"norm": "l2", "sigma": noise.get("sigma"), "steps": 1, "restarts": 1,
                     "samples": 1, "n": 100, "alpha": 0.001},
        "noise": noise, "model": "m", "data": "d", "dataset": "points/test", "input_shape": [4],
        "seed": "s", **more,
    }  # fmt: skip
    table = job_folder.build_table(rows, attack_tables.SCHEMA, about, attack_tables.KEY)
    job_folder.write_table(table, path)
    return path


# Labels 0, 0, 0, 1.
SMOOTHED = {"kind": "input", "sigma": 0.5}
ANSWERS = {
    ("none", 0.0): [0, 0, -1, 1],
    ("fgsm", 0.2): [0, -1, -1, 0],
    ("pgd", 0.2): [-1, 0, 1, 1],
    ("pgd", 9.0): [-1, -1, -1, -1],
}


def test_an_abstention_is_neither_right_nor_wrong(tmp_path: Path) -> None:
    table = read_attack(attacks(tmp_path / "a" / "attacks.parquet", SMOOTHED, ANSWERS))
    assert table.outcome_shares("none", 0.0) == OutcomeShares(0.75, 0.25, 0.0)
    assert table.outcome_shares("fgsm", 0.2) == OutcomeShares(0.25, 0.5, 0.25)
    assert table.outcome_shares("pgd", 0.2) == OutcomeShares(0.5, 0.25, 0.25)
    # Wrong under one is wrong; right under all is right; what is left was never decided against.
    assert table.worst(0.2) == OutcomeShares(0.0, 0.5, 0.5)
    assert table.worst(9.0) == OutcomeShares(0.0, 1.0, 0.0)
    certificates = table_reader.read(smoothed_table(tmp_path / "c" / "certificates.parquet"))
    shown = attack_outcome_table(table, [certificates])
    assert shown.rows == [
        ["0", "none", "75.00", "25.00", "0.00", "75.00"],
        ["0.2", "fgsm", "25.00", "50.00", "25.00", "75.00"],
        ["0.2", "pgd", "50.00", "25.00", "25.00", "75.00"],
        ["0.2", "all of them", "0.00", "50.00", "50.00", "75.00"],
        ["9", "pgd", "0.00", "100.00", "0.00", "0.00"],
    ]
    facts: Any = SimpleNamespace(folder=RunFolder(tmp_path / "run"), attacks=[table])
    assert compare.attacked_accuracy_rows([facts], "l2")[1:] == [
        ["run", table.description, "0", "none", "75.00", "25.00", "0.00"],
        ["run", table.description, "0.2", "fgsm, pgd", "0.00", "50.00", "50.00"],
        ["run", table.description, "9", "pgd", "0.00", "100.00", "0.00"],
    ]


@pytest.mark.parametrize(
    ("noise", "changes", "shown", "same"),
    [
        (SMOOTHED, {}, True, True),
        (SMOOTHED, {"sigma": 0.25}, True, False),
        (SMOOTHED, {"noise": "laplace"}, True, False),
        (SMOOTHED, {"data": "other"}, False, False),
        (SMOOTHED, {"model": "other"}, False, False),
        ({"kind": "none"}, {}, True, False),
    ],
)
def test_the_same_classifier_is_the_same_model_data_and_noise(
    tmp_path: Path, noise: dict[str, Any], changes: dict[str, Any], shown: bool, same: bool
) -> None:
    table = read_attack(attacks(tmp_path / "a" / "attacks.parquet", noise, ANSWERS))
    certificates = table_reader.read(
        smoothed_table(tmp_path / "c" / "certificates.parquet", changes)
    )
    assert is_same_classifier(table, certificates) == same
    found = attack_outcome_table(table, [certificates])
    assert (len(found.header) == 6) == shown == bool(found.notes)


def test_a_table_made_from_others_replaces_no_certification(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "x")
    path = smoothed_table(run.certificates / "first/certificates.parquet")
    kept = path.parent.with_name("first-alpha-0.01")
    shutil.copytree(path.parent, kept)
    (kept / "settings.json").write_text("{}")
    before = (kept / path.name).read_bytes()
    with pytest.raises(UserError, match=r"first-alpha-0\.01:"):
        certify._recertified(path.parent, {"certify": {"alpha": 0.01}})
    assert (kept / path.name).read_bytes() == before


def test_an_evaluation_says_what_was_counted_of_this_model(golden: Any, tmp_path: Path) -> None:
    """Of another model it is refused; and the message never says to remove the run."""
    run = golden("digits", tmp_path)
    told = json.loads(run.evaluation.read_text())
    assert load_results(run).evaluation == told
    run.evaluation.write_text(json.dumps(told | {"model": "0" * 32}))
    with pytest.raises(UserError, match=r"evaluation\.json"):
        load_results(run)


def test_each_row_of_a_run_with_several_tables_names_its_table(golden: Any, tmp_path: Path) -> None:
    run = golden("digits", tmp_path)
    (table,) = load_results(run).tables
    certify._recertified(table.path.parent, {"certify": {"alpha": 0.02}})
    found = load_results(run)
    assert len({each.description for each in found.tables}) == 2
    assert [each.title for each in found.tables] == [each.name for each in found.tables]
    names = [name for name, _ in found.summary()]
    assert len(set(names)) == len(names)
