"""The results of a private evaluation stay among a run's private files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpdist import pipeline
from dpdist.attacks.settings import AttackSettings
from dpdist.audits.membership import Membership
from dpdist.core.errors import UserError
from dpdist.publishing import write_release
from dpdist.runs.archive import export_text, publishable_files, unpack_export

PRIVATE, PUBLIC = Membership(models=2), AttackSettings(sizes=(0.1,))


def test_they_leave_by_no_door(here: None, golden: Any, tmp_path: Path) -> None:
    folder = golden("digits", tmp_path / "runs")
    for name in (PRIVATE.folder_name, PRIVATE.file):
        result = folder.private / "attacks" / name / PRIVATE.file
        result.parent.mkdir(parents=True)
        result.write_text("what attacks found")
    pipeline.report_stage(folder)
    write_release(folder, not_private=True)
    unpack_export(export_text(folder), tmp_path / "fetched")  # by `dpdist cluster fetch`
    left = [path for path in (tmp_path / "fetched").rglob("*") if path.is_file()]
    left += [path for path in folder.release_folder.rglob("*") if path.is_file()]
    left += [folder.path / path for path in publishable_files(folder)]
    assert len(left) > 10 and folder.report_file in left
    assert not any(b"what attacks found" in path.read_bytes() for path in left)


def test_they_are_not_written_where_they_may_be_published(
    here: None, golden: Any, tmp_path: Path
) -> None:
    folder = golden("digits", tmp_path / "runs")
    recipe = folder.read_recipe()
    for place in ("attacks/mine", "certificates", "private/../report"):
        with pytest.raises(UserError, match=place):
            pipeline.evaluation_stage(recipe, folder, PRIVATE, folder.path / place)
    assert PUBLIC.output_folder(folder, folder.path / "attacks/x") == folder.path / "attacks/x"
    for place in (folder.private / "mine", tmp_path / "elsewhere"):
        assert PRIVATE.output_folder(folder, place) == place
