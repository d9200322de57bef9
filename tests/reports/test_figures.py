"""Figures that commands write: the same bytes each time, and a date only where one is asked for."""

from __future__ import annotations

import pytest

from dpdist.reports.figures import plot_search_costs

CURVES = {"fixed": [(10.0, 9.0), (5.0, 6.0), (5.0, 6.0)], "poisson": [(5.0, 3.0), (10.0, 4.0)]}


@pytest.mark.slow
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
