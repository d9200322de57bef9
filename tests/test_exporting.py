"""What leaves a cluster through a job's log: publishable files, whole and unchanged, or nothing."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from dpdist.errors import UserError
from dpdist.exporting import PUBLISHABLE, export, unpack
from dpdist.runfolder import RunFolder

PUBLIC = {
    "recipe.yaml": b"name: x\n",
    "evaluation.json": b"{}",
    "report/index.html": b"<html>" + bytes(range(256)) * 100,
    "certificates/a/certificates.parquet": b"PAR1",
    "release/model.safetensors": b"w",
}
PRIVATE = {
    "run.json": b'{"format": 1, "dpdist": "0"}',
    "private/run.key": b"secret",
    "private/ledger.jsonl": b"secret",
    "other/notes.txt": b"secret",
}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    for name, content in {**PUBLIC, **PRIVATE}.items():
        path = tmp_path / "runs" / "x" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    folder = tmp_path / "runs" / "x"
    (folder / "report" / "link").symlink_to(folder / "private" / "run.key")
    (folder / "evaluation.txt").symlink_to(folder / "private" / "run.key")
    return RunFolder(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_publishable_files_come_home_and_private_ones_stay(run, tmp_path):
    log = f"chatter before\n{export(run)}\nchatter after\n"
    written = unpack(log, tmp_path / "home")
    assert files(tmp_path / "home") == PUBLIC
    assert len(written) == len(PUBLIC)
    assert "private" not in PUBLISHABLE and "run.json" not in PUBLISHABLE


def test_a_release_folder_that_is_a_link_into_private_is_not_followed(run):
    (run.path / "attacks").symlink_to(run.private)
    raw = base64.b64decode("".join(export(run).splitlines()[1:-1]))
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        names = archive.getnames()
    assert names == sorted(PUBLIC, key=lambda name: PUBLISHABLE.index(name.split("/")[0]))
    assert not any(name.startswith("attacks") for name in names)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_log_gives_nothing(run, tmp_path, damage):
    log = export(run)
    if damage == "cut":
        log = log[: len(log) // 2]
    elif damage == "changed":
        middle = len(log) // 2
        log = log[:middle] + ("A" if log[middle] != "A" else "B") + log[middle + 1 :]
    else:
        log = "nothing here"
    with pytest.raises(UserError, match="export"):
        unpack(log, tmp_path / "home")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "private/run.key", "report/../../evil"])
def test_a_file_that_has_no_business_there_is_refused(name, tmp_path):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        info = tarfile.TarInfo(name)
        info.size = 1
        archive.addfile(info, io.BytesIO(b"x"))
    digest = hashlib.blake2b(raw.getvalue(), digest_size=16).hexdigest()
    text = base64.b64encode(raw.getvalue()).decode()
    log = f"-----BEGIN DPDIST EXPORT-----\n{text}\n-----END DPDIST EXPORT {digest}-----"
    with pytest.raises(UserError, match="may not leave"):
        unpack(log, tmp_path / "home")
    assert not (tmp_path / "home").exists() and not (tmp_path / "evil").exists()


def test_too_much_for_a_log_is_refused(run):
    with pytest.raises(UserError, match="copy it from the shared storage"):
        export(run, limit=100)
