"""Figures that commands write: the same bytes each time, and a date only where one is asked for."""

from __future__ import annotations

import pytest

from dpdist.core.errors import UserError
from dpdist.reports.figures import plot_search_costs

CURVES = {"fixed": [(10.0, 9.0), (5.0, 6.0), (5.0, 6.0)], "poisson": [(5.0, 3.0), (10.0, 4.0)]}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["svg", "pdf", "png"])
def test_a_figure_has_the_same_bytes_each_time(tmp_path, monkeypatch, kind):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    drawn = []
    for number in range(2):
        path = tmp_path / f"{number}.{kind}"
        plot_search_costs(CURVES, 2.0, 1e-5, path)
        drawn.append(path.read_bytes())
    assert drawn[0] == drawn[1]
    assert b"<dc:date>" not in drawn[0] and b"CreationDate" not in drawn[0]


@pytest.mark.long
def test_a_date_that_is_asked_for_is_kept_and_one_that_is_none_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for kind, date in (("svg", b"<dc:date>2023-11-14"), ("pdf", b"CreationDate (D:20231114")):
        plot_search_costs(CURVES, 2.0, 1e-5, tmp_path / f"a.{kind}")
        assert date in (tmp_path / f"a.{kind}").read_bytes()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "x")
    with pytest.raises(UserError, match="SOURCE_DATE_EPOCH: must be a whole number"):
        plot_search_costs(CURVES, 2.0, 1e-5, tmp_path / "b.svg")
    assert not (tmp_path / "b.svg").exists()


def test_the_costs_of_a_search_are_drawn_and_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    plot_search_costs(CURVES, 2.0, 1e-5, tmp_path / "costs.svg")
    text = (tmp_path / "costs.svg").read_text()
    for word in ("fixed", "poisson", "one untuned run", "expected number of trials", "1e-05"):
        assert word in text, word
