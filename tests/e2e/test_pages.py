"""Scripts of README.md and of pages of docs/: each runs as it is printed, in an empty folder."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.language_models import save_model
from support.local_execution import call, command

import dpdist
from dpdist.tuning.manifest import SearchFolder, read_terms

ROOT = Path(__file__).resolve().parents[2]


def snippets(page: str) -> list[tuple[str, str]]:
    """Return the kind and the text of each block of code of a page."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)


def execute(page: str, name: str, folder: Path) -> str:
    """Write all files of a page into a folder and run one of them; return what it prints."""
    for kind, text in snippets(page):
        if kind.startswith("python file="):
            (folder / kind.partition("=")[2]).write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", name], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_the_quickstarts_of_the_readme(tmp_path):
    blocks = snippets("README.md")
    (tmp_path / "quickstart.py").write_text("".join(t for kind, t in blocks if kind == "python"))
    guarantee, certified = execute("README.md", "quickstart.py", tmp_path).splitlines()
    assert ("text", f"{guarantee}\n") in blocks
    assert re.fullmatch(r"certified accuracy at radius 0\.25: \d\d%", certified)
    assert (tmp_path / "certified.png").stat().st_size > 1000


@pytest.mark.slow
def test_every_snippet_on_certifying_any_model(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    page, ran = "docs/how-to/certify-any-model.md", 0
    for kind, text in snippets(page):
        if kind.startswith("python file="):
            (tmp_path / kind.partition("=")[2]).write_text(text)
            sys.modules.pop("nets", None)
            torch.save(importlib.import_module("nets").small().state_dict(), "net.pt")
        elif kind == "python":
            exec(compile(text, page, "exec"), {})
        elif kind != "bash":  # that of a cluster
            for line in text.splitlines():
                done = call(*shlex.split(line)[1:])
                assert done.exit_code == 0, (line, done.output, done.exception)
                ran += 1
    assert ran == 6
    (inline,) = re.findall(r"`dpdist (certify --model [^`]*)`", (ROOT / page).read_text())
    done = call(*shlex.split(inline))
    assert done.exit_code == 0, (done.output, done.exception)
    report = (tmp_path / "runs/mine/report/index.html").read_text()
    assert "not trained by dpdist: no epsilon" in report.lower()


@pytest.mark.timeout(900)
def test_the_story_of_the_hospital(tmp_path, monkeypatch, capsys):
    """Patients, a search, report, technical file."""
    said = execute("docs/tutorials/hospital.md", "hospital.py", tmp_path)
    assert re.search(
        r"^\{'lr': 0\.\d+\}\n\((3\.9\d*|4), 0\.0001\)-DP, zero-out of a user", said, re.M
    ), said
    facts = dpdist.load_results(tmp_path / "runs" / "hospital")
    assert facts.guarantee.kind == "proved" and 3.9 < facts.guarantee.epsilon <= 4
    assert facts.search.objective == "mean of Brier score"
    assert facts.plan.records == 800 and facts.plan.user.max_records == 3
    assumed = read_terms(SearchFolder(facts.folder))["assumed"]
    assert "the number of held-out users (300) is public" in assumed

    monkeypatch.syspath_prepend(str(tmp_path))
    for words in (
        ("report", "runs/hospital", "--technical-file"),
        ("verify", "runs/hospital/release", "--trust-factory", "risk:network"),
    ):
        done = command(monkeypatch, capsys, tmp_path, *words)
        assert done.code == 0, done.err + done.out
    assert "Brier score" in (tmp_path / "runs/hospital/report/index.html").read_text()
    release = tmp_path / "runs" / "hospital" / "release"
    card = dpdist.load(release, trusted_factory="risk:network").card
    assert card["guarantee"]["epsilon"] == facts.guarantee.epsilon
    dossier = (facts.folder.path / "report" / "technical-file.md").read_text()
    assert "Annex IV" in dossier and "Article 35(7)" in dossier and "patient" not in dossier


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_scripts_of_bert_with_lora(tmp_path):
    """Docstrings as records, and the Trainer, on a tiny random base."""
    page = "docs/tutorials/bert-lora.md"
    execute(page, "records.py", tmp_path)
    split = {}
    for name in ("train", "test"):
        lines = (tmp_path / "libraries" / f"{name}.jsonl").read_text().splitlines()
        split[name] = {json.loads(line)["text"] for line in lines}
        assert {json.loads(line)["label"] for line in lines} == {"pandas", "ray", "scipy", "torch"}
        assert len(split[name]) == len(lines) > 1000
    assert not split["train"] & split["test"]

    save_model(tmp_path / "base", "bert")
    assert re.match(r"\((2\.99\d*|3), 1e-06\)-DP", execute(page, "trainer.py", tmp_path))
    assert (tmp_path / "adapter" / "privacy_card.md").exists()


TUNING = "docs/how-to/tuning.md"


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_our_script_for_tuning(tmp_path):
    said = execute(TUNING, "after.py", tmp_path)
    expected = r"^\{'lr': .*, 'width': (8|16)\}\n\((2\.99\d*|3), 0\.0001\)-DP"
    assert re.search(expected, said, re.M), said
    best = dpdist.load_results(tmp_path / "runs" / "searched")
    assert 2.9 < best.guarantee.epsilon <= 3 and best.guarantee.kind == "proved"
    release = dpdist.load(tmp_path / "runs" / "searched" / "release")
    assert release.card["guarantee"]["epsilon"] == best.guarantee.epsilon
    assert release.card["extra"]["model"] in ("nets:narrow", "nets:wide")


OPACUS = "docs/how-to/from-opacus.md"


def test_our_script_beside_opacus_runs_as_printed(tmp_path):
    guarantee, accuracy = execute(OPACUS, "after.py", tmp_path).splitlines()
    facts = dpdist.load_results(tmp_path / "runs" / "digits")
    assert guarantee == str(facts.guarantee) and 2.9 < facts.guarantee.epsilon <= 3
    assert float(accuracy.split()[1]) > 0.8
    assert any("RandomSampler" in note for note in facts.privacy_card()["notes"])


@pytest.mark.nightly
def test_the_script_for_opacus(tmp_path):
    pytest.importorskip("opacus")
    epsilon, accuracy = execute(OPACUS, "before.py", tmp_path).splitlines()
    assert 2.9 < float(epsilon.split()[1]) <= 3 and float(accuracy.split()[1]) > 0.7
