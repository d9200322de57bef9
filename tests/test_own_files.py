"""A file of dpdist's own of another shape is refused in one line that names file and key."""

from __future__ import annotations

from typing import Any

import pytest

from dpdist.cluster.job_folder import JobRecord
from dpdist.core.errors import UserError
from dpdist.core.fields import FileShape
from dpdist.runs.folder import CheckpointRecord
from dpdist.tuning.manifest import ScoresRecord, SettingsRecord

LEDGER = {"check": "b088b22fd1245eeefb0a9713a3a79c56", "records": 8}
GOOD: list[tuple[type[FileShape], dict[str, Any]]] = [
    (CheckpointRecord, {"step": 83, "ledger": LEDGER}),
    (ScoresRecord, {"done": True, "failed": None, "scores": [0.25]}),
    (SettingsRecord, {"noise_multiplier": 2.0, "values": {"training": {"steps": 1}}}),
    (JobRecord, {"format": 2, "seed": "drawn", "settings": {"n": 10}}),
]
WRONG: list[tuple[type[FileShape], dict[str, Any], str]] = [
    (CheckpointRecord, {"step": -1}, "step"),
    (CheckpointRecord, {"step": True}, "step"),
    (CheckpointRecord, {"ledger": {"records": 1}}, "ledger.check"),
    (ScoresRecord, {"scores": []}, "scores"),
    (ScoresRecord, {"scores": ["x"]}, "scores"),
    (SettingsRecord, {"values": 3}, "values"),
    (JobRecord, {"settings": None}, "settings"),
    (JobRecord, {"format": 3}, "format 3"),
]


@pytest.mark.parametrize(("shape", "change", "named"), WRONG)
def test_another_shape_is_refused_by_file_and_key(shape, change, named):
    record = {**dict(GOOD).get(shape, {}), **change}
    with pytest.raises(UserError) as raised:
        shape.parse(record, "FILE")
    said = str(raised.value)
    assert said.startswith("FILE: ") and named in said and "\n" not in said
