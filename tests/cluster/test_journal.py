from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from dpdist.cluster.job_folder import Journal, JournalInUseError


def test_entries_come_back_in_order(tmp_path):
    with Journal(tmp_path / "a" / "journal") as journal:
        journal.append({"k": [1, 2]})
        journal.append("x")
    assert read(tmp_path / "a" / "journal") == [{"k": [1, 2]}, "x"]


@pytest.mark.parametrize("damage", ["torn", "flipped"])
def test_damage_ends_the_journal_and_is_overwritten(tmp_path, damage):
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.append(1)
        journal.append(22222)
    raw = path.read_bytes()
    path.write_bytes(raw[:-3] if damage == "torn" else raw.replace(b"22222", b"22322"))
    with Journal(path) as journal:
        assert list(journal.entries) == [1]
        journal.append(3)
        assert list(journal.entries) == [1]
    assert read(path) == [1, 3]


@pytest.mark.e2e
def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path):
    path = tmp_path / "journal"
    script = (
        "import sys; from pathlib import Path; from dpdist.cluster.job_folder import Journal\n"
        f"journal = Journal(Path({str(path)!r})); journal.append(1)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(JournalInUseError, match="journal"):
            Journal(path)
    finally:
        holder.kill()  # it never closed the journal
        holder.communicate()
    assert read(path) == [1]


@pytest.mark.slow
def test_entries_are_read_one_by_one(tmp_path):
    """A journal of 5,000 entries (1.3 MB) passes through a tenth of that."""
    path = tmp_path / "journal"
    with Journal(path) as journal:
        for number in range(5_000):
            journal.append({"index": number, "histogram": [number] * 50})
    size = path.stat().st_size
    tracemalloc.start()
    try:
        with Journal(path) as journal:
            assert sum(entry["index"] for entry in journal.entries) == 5_000 * 4_999 // 2
            streamed = tracemalloc.get_traced_memory()[1]
            kept = list(journal.entries)
        assert streamed < size / 10 < size < tracemalloc.get_traced_memory()[1]
        assert len(kept) == 5_000
    finally:
        tracemalloc.stop()


def read(path: Path) -> list:
    with Journal(path) as journal:
        return list(journal.entries)
