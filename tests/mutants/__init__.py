"""Planted faults: what a careless change to code that carries a guarantee could be, and the fast
tests that must notice each. `make mutants` plants them one at a time; docs/evidence/testing.md says more."""

from __future__ import annotations

from mutants import (
    audits,
    certification,
    copies,
    files,
    gradients,
    groups,
    integrations,
    poisoning,
    privacy,
    releases,
    teachers,
    text,
    training,
    tuning,
)
from mutants.fault import Fault

FAULTS: list[Fault] = [
    fault
    for area in (
        training,
        gradients,
        groups,
        integrations,
        privacy,
        tuning,
        certification,
        audits,
        teachers,
        poisoning,
        releases,
        files,
        text,
        copies,
    )
    for fault in area.FAULTS
]
