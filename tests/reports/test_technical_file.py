"""The technical file: the points of both regulations, of any run, and nothing beyond the report."""

from __future__ import annotations

import re

import dpdist
from dpdist.reports.technical_file import technical_file

OPEN = "Not part of this run: to be written by the provider."


def test_it_has_the_points_of_both_regulations_and_states_what_the_report_states(
    golden, tmp_path, monkeypatch, dpdist_without_ray
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

    hidden = {**card, "records": None, "private": False}
    monkeypatch.setattr(type(facts), "privacy_card", lambda _: hidden)
    page = technical_file(facts)
    assert "the number of records is not released" in page and page.count("is NOT private") == 2
