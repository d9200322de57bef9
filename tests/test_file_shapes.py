"""Files of one format each: what commit 4596332 wrote is read, and every other shape is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from dpdist.cluster.job_folder import JobRecord
from dpdist.core.errors import UserError
from dpdist.core.fields import FileShape
from dpdist.release.tables import TableRecord
from dpdist.reports.facts import PublishedTrial
from dpdist.runs.archive import ArchiveRecord, Manifest, Permit
from dpdist.runs.folder import (
    CheckpointRecord,
    RunDescription,
    SearchTermsRecord,
    StartRecord,
    TrainingSummary,
)
from dpdist.tuning.manifest import ManifestRecord, OutcomeRecord, ScoresRecord, SettingsRecord

CHECK = "b088b22fd1245eeefb0a9713a3a79c56"
VALUES = '{"training": {"batch_size": 20, "learning_rate": 0.5, "steps": 1}}'
# As they were written at commit 4596332, nested plans and recipes shortened.
WRITTEN: dict[type[FileShape], str] = {
    RunDescription: '{"dpdist": "0.1.0", "format": 1}',
    StartRecord: '{"asked": null, "noise_multiplier": 1.1, "recipe": {"name": "x"}}',
    SearchTermsRecord: '{"assumed": [], "charge": "75ee81916b2b388f", "data": "bc41561d8c57ca54",'
    ' "plan": {"delta": 0.0001}, "score_noise": null, "trial": {"delta": 0.0001}}',
    CheckpointRecord: f'{{"step": 83, "ledger": {{"records": 85, "check": "{CHECK}"}}}}',
    TrainingSummary: '{"attempt_epochs": 1, "fallback_layers": [], "independence": "by structure",'
    f' "ledger": {{"check": "{CHECK}", "records": 8}}, "model": "235e755e6975057b", "steps": 6,'
    ' "superseded_releases": 0}',
    Permit: '{"epoch": 0, "step": 50, "steps": 100}',
    ArchiveRecord: '{"claim": "00000001-fa8d488d54c84367", "number": 1, "private": true,'
    ' "url": "s3://bucket/d97d31010050d42"}',
    Manifest: '{"checkpoint": "", "dpdist": "0.1.0", "files": {"private/data.json": {"digest":'
    ' "4615a41ba0daadbc", "object": "00000001/files/10ede4ab297e95ce/private/data.json", "size":'
    ' 50}}, "format": 1, "keyed": false, "permit": null, "private": true, "run": "run",'
    ' "trained": false}',
    ManifestRecord: '{"format": 1, "trials": [{"key": "9959d9e8", "number": 0, "tie": "8b5af379",'
    f' "values": {VALUES}}}, {{"key": "4bdf30dc", "number": 1, "tie": "06107079", "values":'
    " null}]}",
    SettingsRecord: f'{{"noise_multiplier": 2.0, "values": {VALUES}}}',
    OutcomeRecord: '{"winner": null}',
    PublishedTrial: '{"chosen": true, "failed": null, "noise_multiplier": 2.0, "scores": [0.31],'
    f' "values": {VALUES}}}',
    ScoresRecord: '{"done": true, "failed": null, "scores": [0.3146932197339607]}',
    JobRecord: '{"classifier": null, "data": "d", "format": 1, "model": "A", "seed": "drawn",'
    ' "settings": {"n": 10, "radii": [0.5]}}',
    TableRecord: '{"classes": 10, "classifier": {"batch": 8, "form": "folded", "machine": "cpu",'
    ' "torch_version": "2"}, "data": "d", "format": 1, "inputs": 3, "model": "A", "seed": "drawn",'
    ' "settings": {"n": 10}}',
}
WRONG = (True, 2**70, 1.5, "x", None, [], {}, -1, [1], {"a": 1})
shapes = pytest.mark.parametrize("shape", WRITTEN, ids=lambda shape: shape.__name__)


@shapes
def test_what_an_earlier_commit_wrote_is_read(shape, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(WRITTEN[shape])
    record = json.loads(WRITTEN[shape])
    assert shape.read_keys(path) == record
    found = shape.read(path).model_dump()
    assert {key: found[key] for key in found if key in record} == {
        key: record[key] for key in found if key in record
    } | ({"classifier": found["classifier"]} if shape is TableRecord else {})


def _of_type(shape: type[FileShape], key: str, value: Any) -> bool:
    """Whether the annotation of a key allows a value; by words, not by pydantic."""
    words = str(shape.__annotations__[key])
    if isinstance(value, bool):
        return words == "bool"
    if value is None:
        return "None" in words
    if isinstance(value, int | float):
        whole = isinstance(value, int) and words.startswith(("int", "WholeNumber"))
        small = words.startswith("Number") and abs(value) < 2**63
        return (whole or small) and (value >= 0 or not words.startswith("WholeNumber"))
    kinds = {str: ("str", "RunName", "Annotated"), list: ("list",), dict: ("Keys", "dict")}
    return words.startswith(kinds[type(value)])


def _edits(shape: type[FileShape]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield (key, record, whether it has the right type) of a file with one key replaced."""
    good = json.loads(WRITTEN[shape])
    for key in shape.model_fields:
        if shape.model_fields[key].is_required():
            yield key, {name: value for name, value in good.items() if name != key}, False
        for value in WRONG:
            yield key, {**copy.deepcopy(good), key: value}, _of_type(shape, key, value)


# Where the type is right and the value is not, or the content has rules of its own.
RULES = {
    (Permit, "step"), (Permit, "steps"), (Manifest, "files"), (Manifest, "format"),
    (ManifestRecord, "trials"), (ManifestRecord, "format"), (ScoresRecord, "scores"),
    (RunDescription, "format"), (JobRecord, "format"),
}  # fmt: skip


@shapes
def test_another_shape_is_refused_in_one_line(shape, tmp_path):
    for key, record, right in _edits(shape):
        try:
            shape.parse(record, "FILE")
        except UserError as error:
            assert not right or (shape, key) in RULES, (key, record)
            said = str(error)
            assert "\n" not in said and len(said) < 300, said
            assert said.startswith(("FILE: damaged: ", "FILE: written by a newer dpdist (")), said
            assert "newer" in said or key in said, said
        else:
            assert right, (key, record)


def test_rules_that_types_cannot_say():
    for shape, change, why in (
        (Permit, {"step": 101}, "steps must be >= 101"),
        (Permit, {"more": 1}, "more is an unknown key"),
        (Manifest, {"run": "../x"}, "run must be letters"),
        (Manifest, {"permit": {"epoch": 0, "step": 0.5, "steps": 1}}, "permit.step must be int"),
        (
            TrainingSummary,
            {"ledger": {"records": 0, "check": ""}},
            "ledger.records must be a whole",
        ),
        (
            TrainingSummary,
            {"ledger": {"records": 1, "check": "", "a": 1}},
            "ledger.a is an unknown",
        ),
        (ScoresRecord, {"scores": []}, "scores must be numbers"),
        (ManifestRecord, {"trials": [{"number": 0}]}, "trials.0.key is missing"),
        (JobRecord, {"format": 2}, "written by a newer dpdist (format 2; this one reads"),
        (RunDescription, {"format": 2}, "written by a newer dpdist (0.1.0, format 2; this"),
    ):
        with pytest.raises(UserError) as raised:
            shape.parse({**json.loads(WRITTEN[shape]), **change}, "FILE")
        assert why in str(raised.value), raised.value
