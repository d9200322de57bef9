"""Files are whole, durable and private: in which order bytes, names and folders reach the disk.
Journals end where they are damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dpdist.cluster import job_folder
from dpdist.cluster.job_folder import Journal, JournalInUseError
from dpdist.core.files import (
    TRAINING_FOLDER,
    atomic_folder,
    make_private_folder,
    temporary_folder,
    write_atomic,
    write_files_atomic,
    write_json,
    write_result,
)


@pytest.fixture
def disk(monkeypatch):
    """What was done to the disk, in order: writes synced (with their size), renames, folders."""
    done: list[tuple] = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        size = None if folder else os.fstat(descriptor).st_size
        done.append(("folder",) if folder else ("synced", size))
        sync(descriptor)

    def renamed(source, target) -> None:
        done.append(("renamed", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renamed)
    return done


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_return(tmp_path, disk):
    write_atomic(tmp_path / "a" / "file", b"12345")
    above = ("folder",)  # the name of the new folder "a"
    assert disk == [above, ("synced", 5), ("renamed", "file"), ("folder",)]
    assert (tmp_path / "a" / "file").read_bytes() == b"12345"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["file"]


def crash(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_crash_before_the_rename_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomic(path, "old")
    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, function, crash)
            write_atomic(path, "new and longer")
        assert path.read_text() == "old"
    write_json(path, {"b": 1, "a": [2]})
    assert path.read_text() == '{\n  "a": [\n    2\n  ],\n  "b": 1\n}\n'


@pytest.mark.parametrize("first", [True, False])
def test_files_that_belong_together_are_replaced_together(tmp_path, first):
    """One that cannot be written (its name leaves no room for another beside it) leaves all."""
    files = {tmp_path / "a": "new", tmp_path / "b": "new"}
    write_files_atomic(dict.fromkeys(files, "old"))
    with pytest.raises(OSError, match="too long"):
        bad = {tmp_path / ("x" * 255): "new"}
        write_files_atomic(bad | files if first else files | bad)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(files, "old")
    write_files_atomic(files)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == files


def test_of_two_that_build_a_folder_the_first_one_s_stays(tmp_path):
    folder = tmp_path / "folder"
    with atomic_folder(folder, keep_existing=True) as mine:
        mine.mkdir()
        (mine / "mine").write_text("x")
        # as another process, or another host
        with atomic_folder(folder, keep_existing=True) as other:
            other.mkdir()
            (other / "other").write_text("x")
    assert [p.name for p in folder.iterdir()] == ["other"] and len(list(tmp_path.iterdir())) == 1
    with pytest.raises(OSError), atomic_folder(folder) as late:
        late.mkdir()


@pytest.fixture
def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_a_killed_process_left_half_written_goes(tmp_path, dead):
    """With the next writer of that name, or of a folder that one process holds; what a living
    process writes, and whatever is called otherwise, stays."""
    living = os.getpid()
    kept = {f".a.{living}-00000000", f".a.{dead}-0", f"a.{dead}-00000000", ".hidden"}
    for name in (*kept, f".a.{dead}-00000000", f".b.{dead}-0123abcd", f".release.{dead}-00000000"):
        (tmp_path / name).write_text("half")

    def there() -> set[str]:
        return {path.name for path in tmp_path.iterdir()} - kept

    write_files_atomic({tmp_path / "a": "new"})
    assert there() == {"a", f".b.{dead}-0123abcd", f".release.{dead}-00000000"}
    with atomic_folder(tmp_path / "release", replace=True) as aside:
        aside.mkdir()
    assert there() == {"a", f".b.{dead}-0123abcd", "release"}
    (tmp_path / "settings.json").write_text("{}")
    with job_folder.open_job_folder(tmp_path, job_folder.JobKind("job", "working")):
        assert f".b.{dead}-0123abcd" not in there()
    assert kept < {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("there", [True, False])
def test_a_result_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch, there):
    path, link = tmp_path / "table.csv", tmp_path / "link.csv"
    link.symlink_to(path)
    if there:
        path.write_text("before")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", crash)
        write_result(link, "half")
    assert sorted(tmp_path.iterdir()) == [link, path][: 2 if there else 1]
    assert not there or path.read_text() == "before"
    write_result(link, "after")
    assert link.is_symlink() and path.read_text() == "after"


# Holds a folder like those of single trainings, says where, and waits to be killed.
HOLDS = """
import sys, time
from dpdist.core.files import TRAINING_FOLDER, temporary_folder
with temporary_folder(TRAINING_FOLDER) as folder:
    (folder / "run.key").write_text("secret")
    print(folder, flush=True)
    time.sleep(600)
"""


def holder(**environment: str) -> tuple[subprocess.Popen, Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_training_s_folder_goes_with_the_next_one(tmp_path, monkeypatch):
    """Its run key stayed in /tmp; that of a living process stays until it ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, left = holder(TMPDIR=str(tmp_path))
    living, kept = holder(TMPDIR=str(tmp_path))
    stranger = tmp_path / f"{TRAINING_FOLDER}of-somebody"
    stranger.mkdir()
    try:
        assert left.stat().st_mode & 0o777 == 0o700 and left.parent == tmp_path
        killed.kill()
        killed.wait()
        assert (left / "run.key").exists()
        with pytest.raises(ValueError), temporary_folder(TRAINING_FOLDER) as own:
            assert not left.exists() and own.is_dir()
            assert (kept / "run.key").exists() and stranger.is_dir()
            raise ValueError
        assert not own.exists()
    finally:
        living.kill()
        living.communicate()


def test_a_private_folder_is_its_owner_s(tmp_path):
    (tmp_path / "a").mkdir(mode=0o755)
    for name in ("a", "b/c"):
        assert make_private_folder(tmp_path / name).stat().st_mode & 0o777 == 0o700


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


def read(path: Path) -> list:
    with Journal(path) as journal:
        return list(journal.entries)
