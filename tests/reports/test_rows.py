"""A run's results are stated once: terminal, Python, page, card and JSON render the same rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.local_execution import command
from support.recipes import write_recipe

import dpdist
from dpdist.core.console import Row, format_html_table, format_markdown_table, format_table
from dpdist.reports.export import run_as_json

RECIPE = {
    "data": {"name": "digits", "max_train": 400},
    "model": "linear",
    "privacy": {"noise_multiplier": 4.0, "delta": 1e-4},
    "training": {"batch_size": 100, "steps": 12, "learning_rate": 0.5},
    "certify": {"sigma": 0.1, "n": 100, "n0": 10, "max_inputs": 12, "radii": [0.05]},
}


@pytest.mark.parametrize("columns", [80, 100])
def test_lines_are_as_wide_as_asked_for(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [
        Row("privacy", "ε = 2.999 at δ = 1e-4", "zero-out adjacency, PLD accountant"),
        Row("units", "word " * 60),
        ("path", "/" + "x" * 40),
    ]
    lines = format_table(rows, "Run x").splitlines()
    assert max(map(len, lines)) <= columns
    assert "\x1b" not in "".join(lines) and "word" in lines[-2]
    (first,) = [line for line in lines if "Privacy" in line]
    assert ("PLD" in first) == (columns == 100 or len(first) <= 80)


def test_every_rendering_has_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path, RECIPE, "small.yaml")
    done = command(monkeypatch, capsys, tmp_path, "run", "small.yaml")
    assert done.code == 0, done.err
    facts = dpdist.load_results(tmp_path / "runs" / "small")
    rows = facts.rows()
    brief = [row.title for row in rows if row.brief]
    title, *lines = done.out.splitlines()
    assert title.startswith("Run small (")
    assert [line[2:].split("  ")[0] for line in lines] == brief
    assert str(facts.folder) == str(facts) and repr(facts).count("\n") == len(rows)
    assert brief[-3:] == ["Test accuracy", "Certified accuracy", "Report"]
    page = facts.folder.report_file.read_text()
    assert format_html_table(rows, "x") and all(
        row.title in page for row in rows if row.name != "report"
    )
    said = json.loads(json.dumps(run_as_json(facts)))["rows"]
    assert [(each["name"], each["value"]) for each in said] == facts.summary()
    dpdist.write_release(facts.folder, license="MIT")
    card = (facts.folder.release_folder / "README.md").read_text()
    stated = dpdist.load(facts.folder.release_folder).rows
    assert format_markdown_table(stated) in card
    same = [row for row in rows if row.name in ("privacy", "certified accuracy")]
    assert all(row in stated for row in same) and len(same) == 2
