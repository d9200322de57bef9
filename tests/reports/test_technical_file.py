"""The technical file: the points of both regulations, of any run, and nothing beyond the report."""

from __future__ import annotations

import re

from support.local_execution import command, run_without_ray

import dpdist
from dpdist import pipeline
from dpdist.reports.technical_file import technical_file
from dpdist.runs.recipe import parse_recipe

BASE = {
    "name": "small",
    "data": {"name": "digits", "max_train": 200},
    "model": {"name": "linear"},
    "privacy": {"epsilon": 3, "delta": 1e-4},
    "training": {"batch_size": 50, "steps": 5, "learning_rate": 0.5},
    "certify": {"sigma": 0.25, "n": 200, "max_inputs": 20},
}
OPEN = "Not held by this run: to be written by the provider."

NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?"


def test_it_has_the_points_of_both_regulations_and_states_what_the_report_states(
    tmp_path, monkeypatch, capsys
):
    run_without_ray(monkeypatch)
    folder = pipeline.run(parse_recipe(BASE, "test"), runs=tmp_path)
    done = command(
        monkeypatch, capsys, tmp_path, "report", "small", "--runs", ".", "--technical-file"
    )
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
    ours = {*map(str, range(1, 10)), "35", "2024", "1689", "2016", "679", "14", "47", "72", "256",
            "25519"}  # fmt: skip
    told = folder.report_file.read_text()
    assert set(re.findall(NUMBER, page)) - set(re.findall(NUMBER, told)) <= ours
    for secret in (str(tmp_path), folder.read_run_key().hex()):
        assert secret not in page

    hidden = {**card, "records": None, "private": False}
    monkeypatch.setattr(type(facts), "privacy_card", lambda _: hidden)
    page = technical_file(facts)
    assert "the number of records is not released" in page and page.count("is NOT private") == 2
