"""The result of an audit: its words, its verdict, its file."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from dpdist.core.errors import UserError
from dpdist.privacy.card import CONSISTENT, EXCEEDS_PROVED, REFUTED, AuditFinding

FOUND = AuditFinding(
    kind="mechanism", method="by a theorem", epsilon=1.23456, delta=1e-5, alpha=0.05,
    view="single releases", adjacency="add-or-remove-one", trials=2000, rule="above 1",
    proved=2.0, assumptions=("it is Gaussian",), details={"sigma": 1.0},
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, CONSISTENT),
        ({"epsilon": 2.1}, EXCEEDS_PROVED),
        ({"curve_rejected": True}, EXCEEDS_PROVED),
        ({"claimed": 1.0}, REFUTED),
        ({"claimed": 1.0, "epsilon": 2.1}, EXCEEDS_PROVED),
        ({"claimed": 1.0, "proved": math.inf}, REFUTED),
        ({"exploratory": True, "epsilon": 9.0, "curve_rejected": True, "claimed": 1}, CONSISTENT),
    ],
)
def test_the_verdict(tmp_path, changes, verdict):
    audited = dataclasses.replace(FOUND, **changes)
    assert audited.verdict == verdict and audited.exceeds_proved == (verdict == EXCEEDS_PROVED)
    assert verdict in audited.summary_line or audited.exploratory
    audited.write(tmp_path / "a" / "audit.json")
    back = AuditFinding.read(tmp_path / "a" / "audit.json")
    assert dataclasses.replace(back, path=None) == audited


def test_a_lower_bound_is_rounded_down():
    assert "epsilon >= 1.234 at delta = 1e-05, confidence 95 %" in FOUND.summary_line
    assert FOUND.comparison_line == "claimed nothing, proved 2, audited >= 1.234 at delta = 1e-05"
    assert FOUND.table_cell == ">= 1.234 (mechanism)"
    assert "no statement" in dataclasses.replace(FOUND, exploratory=True).summary_line


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": 2.5},  # not its verdict
        {"epsilon": "1"}, {"alpha": 0.0}, {"proved": "none"}, {"delta": 2.0}, {"more": 1},
        {"model": 3},
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path, changes):
    path = tmp_path / "audit.json"
    FOUND.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=str(path)):
        AuditFinding.read(path)
