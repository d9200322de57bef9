"""Ledgers and budgets with damage that nobody should do, generated: what was changed is refused.

DPDIST_FUZZ_SEED seeds the cases.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dpdist.core.errors import UserError
from dpdist.privacy import budget as budgets
from dpdist.privacy.budget import Charge, DataBudget
from dpdist.privacy.ledger import JournalError, Ledger
from dpdist.privacy.plan import PrivacyPlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = int(os.environ.get("DPDIST_FUZZ_SEED", "0"))


def cases(count: int) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a test that is called with so many generated cases, which `SEED` chooses."""
    chosen = settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    return lambda test: seed(SEED)(chosen(given(st.data())(test)))


def damage(path: Path, draw: Callable[[Any], Any]) -> None:
    """Damage a journal whose lines are chained, or its anchor, in one of many ways."""
    raw = path.read_bytes()
    lines = raw.splitlines(keepends=True)
    at = draw(st.integers(0, len(lines) - 1))
    kind = draw(
        st.sampled_from(["dropped", "swapped", "twice", "edited", "cut", "flipped", "bytes"])
    )
    if kind == "swapped" and len(lines) > 1:
        other = (at + 1) % len(lines)
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == "twice":
        lines.insert(at, lines[at])
    elif kind == "edited" and path.suffix == ".jsonl":
        record = json.loads(lines[at])
        record["record"] = draw(st.sampled_from([{}, [], None, {"step": 1}, "x", {"kind": 1}]))
        lines[at] = json.dumps(record).encode() + b"\n"
    elif kind == "cut":
        lines[at:] = [lines[at][: draw(st.integers(0, len(lines[at]) - 1))]]
    elif kind == "flipped":
        place = draw(st.integers(0, len(raw) - 1))
        lines = [raw[:place], bytes([draw(st.integers(0, 255))]), raw[place + 1 :]]
    elif kind == "bytes":
        lines = [draw(st.sampled_from([b"", b"{", b"[]", b"null", b"\xff\xfe"]) | st.binary())]
    else:
        del lines[at]
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("kind", ["ledger", "budget"])
def test_journals(tmp_path, kind):
    """Ledgers and budgets with lines gone, moved or changed, or files that are none."""
    place, whole = tmp_path / "work", tmp_path / "whole"
    reader: Callable[[Path], Any] = DataBudget.open
    if kind == "ledger":
        whole.mkdir()
        with Ledger.open(whole / "ledger.jsonl", "f" * 64) as ledger:
            ledger.begin_attempt({"code": "1"})
            for step in range(4):
                ledger.record(step, f"{step:064x}")
        reader = lambda path: Ledger.open(path, "f" * 64)  # noqa: E731
    else:
        plan = PrivacyPlan.dp_sgd(
            records=100, batch_size=10, noise_multiplier=2.0, steps=4, delta=1e-4
        )
        charge = Charge.for_plan("x", "x", plan, plan.phases)
        budgets.reserve(whole, np.arange(100.0), charge, None, plan.adjacency, name="toy")
    journal = next(whole.glob("*.jsonl"))
    anchor = next(path for path in whole.iterdir() if path.suffix == ".anchor")

    @cases(120)
    def one(data):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(whole, place)
        name = data.draw(st.sampled_from([journal.name, journal.name, anchor.name]))
        damage(place / name, data.draw)
        # of the anchor, its line's end may be missing
        ends = bytes.strip if name == anchor.name else bytes
        if ends((place / name).read_bytes()) == ends((whole / name).read_bytes()):
            return
        with pytest.raises((JournalError, UserError)):
            reader(place / journal.name).close()

    one()
