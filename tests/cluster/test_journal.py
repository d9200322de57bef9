from __future__ import annotations

from pathlib import Path

import pytest

from cluster.journal import Journal


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    with Journal(tmp_path / "a" / "journal") as journal:
        journal.append({"k": [1, 2]})
        journal.append("x")
    assert Journal(tmp_path / "a" / "journal").entries == [{"k": [1, 2]}, "x"]


@pytest.mark.parametrize("damage", ["torn", "flipped"])
def test_damage_ends_the_journal_and_is_overwritten(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.append(1)
        journal.append(22222)
    raw = path.read_bytes()
    path.write_bytes(raw[:-3] if damage == "torn" else raw.replace(b"22222", b"22322"))
    with Journal(path) as journal:
        assert journal.entries == [1]
        journal.append(3)
    assert Journal(path).entries == [1, 3]
