"""What a journal or a budget holds after a power cut or without its anchor, and of which kind."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.power_cut import Disk, anchor_of

from dpdist.privacy import budget
from dpdist.privacy.budget import Charge, DataBudget
from dpdist.privacy.ledger import Anchor, ChainedJournal, JournalError, Ledger, anchor_path
from dpdist.privacy.phases import GaussianReleases
from dpdist.privacy.plan import PrivacyPlan
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import parse_recipe

PLAN = PrivacyPlan(1000, (GaussianReleases(4.0),), 1e-5)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    return Disk(tmp_path, monkeypatch)


def whole(disk: Disk, path: Path) -> bool:
    return disk.surviving_bytes(path) == path.read_bytes()


def test_a_new_journal_survives_a_power_cut(tmp_path, disk):
    """Itself, its anchor, and the names of all folders that were made for it."""
    path = tmp_path / "runs" / "demo" / "private" / "ledger.jsonl"
    with closing(ChainedJournal.open(path, "plan", {})):
        assert whole(disk, path) and whole(disk, anchor_path(path))


def test_a_record_survives_a_power_cut_and_its_anchor_never_says_more(tmp_path, disk):
    path = tmp_path / "private" / "ledger.jsonl"
    with closing(ChainedJournal.open(path, "plan", {})) as journal:
        for number in range(3):
            journal.append({"number": number})
            left = disk.surviving_bytes(path)
            assert left == path.read_bytes()
            anchor = Anchor.from_line(disk.surviving_bytes(anchor_path(path)).decode())
            assert anchor.records <= left.count(b"\n")
    with closing(ChainedJournal.open(path, "plan", {})):  # from here on the anchor covers them
        kept = Anchor.from_line(disk.surviving_bytes(anchor_path(path)).decode())
        assert kept == anchor_of(path.read_bytes())


def test_a_reservation_survives_a_power_cut(tmp_path, disk):
    """With the key that its records are recognized by, and the folder itself."""
    folder = tmp_path / "shared" / "team" / "budgets"
    charge = Charge.for_plan("run", "a run", PLAN, PLAN.phases)
    budget.reserve(folder, np.arange(10.0), charge, None, PLAN.adjacency)
    files = sorted(folder.iterdir())
    assert len(files) == 3
    for path in files:
        if path.suffix == ".anchor":
            assert disk.is_reachable(path)
        else:
            assert whole(disk, path)
    assert budget.settle(folder, "run", PLAN.phases)
    (path,) = folder.glob("*.budget.jsonl")
    assert whole(disk, path)


def test_a_new_run_survives_a_power_cut(tmp_path, disk):
    """All that a training needs to go on, and the ledger that it writes there."""
    run = RunFolder(tmp_path / "runs" / "demo")
    training = {"batch_size": 10, "steps": 2, "learning_rate": 0.1}
    privacy = {"noise_multiplier": 1.0, "delta": 1e-5}
    raw = {"name": "demo", "data": {"name": "digits"}, "model": "linear", "privacy": privacy}
    run.create_or_open(parse_recipe(raw | {"training": training}, "r.yaml"))
    with Ledger.open(run.ledger, PLAN.fingerprint()):
        files = [path for path in run.path.rglob("*") if path.is_file()]
        assert run.ledger in files and run.recipe_file in files
        assert all(whole(disk, path) for path in files)


def test_no_other_kind_of_journal_is_a_ledger_or_a_budget(tmp_path):
    """Nor one whose header happens to hold what the other kind's would."""
    other = tmp_path / "other.jsonl"
    header = {"plan": PLAN.fingerprint(), "format": 2, "name": "", "terms": {"ceiling": None}}
    with closing(ChainedJournal.open(other, "something else", header)):
        pass
    for reading in (
        lambda: Ledger.open(other, PLAN.fingerprint()),
        lambda: Ledger.read(other),
        lambda: DataBudget.open(other),
        lambda: DataBudget.read(other),
    ):
        with pytest.raises(JournalError):
            reading()
