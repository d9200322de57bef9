"""The kinds of phases, and the door for those that come from a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpdist.privacy.combined import ParallelParts, RepeatAndSelect, WorstOf
from dpdist.privacy.phases import Phase
from dpdist.privacy.releases import (
    FixedBatches,
    GaussianAnswers,
    GaussianReleases,
    GaussianSteps,
    LaplaceReleases,
    NoisyRecords,
    NonPrivate,
)
from dpdist.privacy.votes import NoisyVotes

_CLASSES: tuple[type[Phase], ...] = (
    GaussianSteps,
    LaplaceReleases,
    GaussianReleases,
    FixedBatches,
    GaussianAnswers,
    NoisyRecords,
    NoisyVotes,
    NonPrivate,
    ParallelParts,
    RepeatAndSelect,
    WorstOf,
)
KINDS: dict[str, type[Phase]] = {phase.kind: phase for phase in _CLASSES}


def phase_from_dict(record: dict[str, Any]) -> Phase:
    """Inverse of `Phase.to_dict`. Raises ValueError for an unknown kind or missing field."""
    values = dict(record)
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"unknown kind of phase: {kind!r}")
    try:
        return KINDS[kind].read(values, phases_from)
    except (TypeError, KeyError) as error:
        raise ValueError(f"a {kind} phase is incomplete: {error}") from error


def phases_from(records: Sequence[dict[str, Any]]) -> tuple[Phase, ...]:
    """`phase_from_dict` of each."""
    return tuple(map(phase_from_dict, records))
