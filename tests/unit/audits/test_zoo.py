"""Every planted fault is found at 1 - 1e-6, and correct pieces are accused no more often."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.zoo import FAULTS, SOUND, Fault

from dpdist.audits.mechanism import SCENARIOS

# The scene by which each is found: the others, which find nothing, would only take time.
BY = {
    "noise x 0.9": "canaries",
    "missing share": "canaries",
    "per-tensor clip": "canaries",
    "all records on every rank": "canaries",
    "empty batches skipped": "alone",
    "one seed for all ranks": "witness",
    "another sampler": "witness",
    "realized divisor": "neighbor",
    "divisor of N": "neighbor",
    "batch statistic": "crowd",
}


def by_day(faults: tuple[Fault, ...]) -> list[Any]:
    """Only the replays, which take no statistics."""
    slow = pytest.mark.slow
    return [pytest.param(each, marks=[slow] * (each.replay is None)) for each in faults]


@pytest.mark.parametrize("fault", by_day(FAULTS), ids=lambda fault: fault.name)
def test_every_fault_is_found(fault: Fault) -> None:
    if fault.replay is not None:
        assert len(fault.find()) == 1
        return
    of_ranks = "share" in fault.name or "rank" in fault.name
    few = fault if of_ranks else dataclasses.replace(fault, workers=1)
    assert few.find([BY[fault.name]]) == [BY[fault.name]]


@pytest.mark.parametrize("fault", by_day(SOUND), ids=lambda fault: fault.name)
def test_sound_pieces_are_not_accused(fault: Fault) -> None:
    scenes = SCENARIOS if fault.workers > 1 else SCENARIOS[:1]
    assert dataclasses.replace(fault, releases_needed=1000).find(scenes) == []
