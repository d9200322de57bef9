"""docs/tutorials/hospital.md from end to end: patients, a search, report, technical file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.local_execution import command

import dpdist
from dpdist.tuning.manifest import SearchFolder, read_terms

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/tutorials/hospital.md").read_text()
SCRIPTS = dict(re.findall(r"^```python file=(\S+)\n(.*?)^```", PAGE, flags=re.M | re.S))


def test_the_story_runs_as_printed(tmp_path, monkeypatch, capsys):
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "hospital.py"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\{'lr': 0\.\d+\}\n\((3\.9\d*|4), 0\.0001\)-DP, zero-out of a user",
                     done.stdout, re.M), done.stdout  # fmt: skip
    facts = dpdist.load_results(tmp_path / "runs" / "hospital")
    assert facts.guarantee.kind == "proved" and 3.9 < facts.guarantee.epsilon <= 4
    assert facts.search.objective == "mean of Brier score"
    assert facts.plan.records == 800 and facts.plan.user.max_records == 3
    assumed = read_terms(SearchFolder(facts.folder))["assumed"]
    assert "the number of held-out users (300) is public" in assumed

    monkeypatch.syspath_prepend(str(tmp_path))
    report = command(monkeypatch, capsys, tmp_path, "report", "runs/hospital",
                     "--technical-file")  # fmt: skip
    assert report.code == 0, report.err
    assert "Brier score" in (tmp_path / "runs/hospital/report/index.html").read_text()
    verified = command(
        monkeypatch, capsys, tmp_path, "verify", "runs/hospital/release",
        "--trust-factory", "risk:network",
    )  # fmt: skip
    assert verified.code == 0, verified.err + verified.out
    release = tmp_path / "runs" / "hospital" / "release"
    card = dpdist.load(release, trusted_factory="risk:network").card
    assert card["guarantee"]["epsilon"] == facts.guarantee.epsilon
    dossier = (facts.folder.path / "report" / "technical-file.md").read_text()
    assert "Annex IV" in dossier and "Article 35(7)" in dossier and "patient" not in dossier
