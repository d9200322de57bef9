"""--json: one object on standard output, of what may be published; everything else elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.local_execution import command
from support.recipes import write_recipe

from dpdist.reports.results import load_results
from dpdist.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("here")
RECIPE = {
    "data": {"name": "digits"},
    "model": "linear",
    "privacy": {"noise_multiplier": 4.0, "delta": 1e-4, "run_key": "5a" * 32},
    "training": {"batch_size": 100, "steps": 2, "learning_rate": 0.1},
    "certify": {"sigma": 0.3, "n": 200, "n0": 20, "max_inputs": 4, "radii": [0.1]},
}
# Of private/metrics.jsonl, the key and the ledger: nothing that a run publishes is called so.
PRIVATE = ("loss", "norm_", "seconds", "run_key", "seed", "hits")


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    work = tmp_path_factory.mktemp("json")
    write_recipe(work, RECIPE, "small.yaml")
    return work


@pytest.fixture
def answer(work, monkeypatch, capsys):
    """The object that a command prints."""

    def ask(*words: object):
        done = command(monkeypatch, capsys, work, *words, "--json")
        assert done.code == 0, done.err
        (line,) = done.out.splitlines()
        return json.loads(line, parse_constant=lambda name: pytest.fail(name))

    return ask


def names(value) -> set[str]:
    """Of all keys, at any depth."""
    if isinstance(value, list):
        return set().union(*map(names, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    return set(value) | names(list(value.values()))


def test_each_command_prints_one_object_of_what_may_be_published(answer, work):
    assert set(answer("run", "small.yaml", "--dry-run")["plan"]) >= {"guarantee", "steps"}
    ran = answer("run", "small.yaml", "--set", "resources.checkpoint_seconds=60")
    facts = load_results(RunFolder(work / "runs" / "small"))
    assert ran["run"] == "small" and ran["privacy_card"] == json.loads(
        json.dumps(facts.privacy_card())
    )
    assert ran["evaluation"]["accuracy"] == facts.evaluation["accuracy"]
    (table,) = ran["certificates"]
    assert [each["radius"] for each in table["certified"]] == [0.0, 0.1]
    assert table["certified"][1]["accuracy"] == facts.tables[0].certified_accuracy(0.1)
    assert 0 <= table["population"][0]["at_least"] <= table["certified"][0]["accuracy"]

    # Page, card and terminal state the same rows.
    rows, page = facts.rows(), facts.folder.report_file.read_text()
    assert all(row.title in page for row in rows if row.name != "report")
    said = [(each["name"], each["value"]) for each in ran["rows"] if each["name"] != "report"]
    assert said == [row for row in facts.summary() if row[0] != "report"]

    again = answer("certify", facts.tables[0].path, "--set", "certify.alpha=0.01")
    assert again["run"] == "small" and again["certificates"][0]["alpha"] == 0.01
    assert answer("run", "small.yaml", "--name", "other")["run"] == "other"
    both = answer("report", "small", "other", "--l2", "0.1")
    assert [run["run"] for run in both["runs"]] == ["small", "other"]
    plain, certified, *_ = both["differences"]
    assert (plain["what"], plain["size"], certified["size"]) == ("plain accuracy", None, 0.1)
    assert plain["low"] <= plain["difference"] <= plain["high"]
    curve, *_ = both["whole_curves"]
    assert (curve["run"], curve["less"], curve["sizes"][-1]) == ("other", "small", 0.1)
    assert curve["low"][0] <= certified["difference"] <= curve["high"][0]
    released = answer("release", "small", "--not-private")
    assert released["privacy_card"] == json.loads(
        (work / "runs/small/release/privacy_card.json").read_text()
    )
    for found in (ran, again, both, released):
        said = names(found)
        assert not [name for name in said for private in PRIVATE if name.startswith(private)]
        assert "5a5a5a" not in json.dumps(found) and "private/" not in json.dumps(found)
