"""What leaves a cluster through a job's log: publishable files, whole and unchanged, or nothing."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile

import pytest
from support.folder_contents import contents

from dpdist.core.errors import UserError
from dpdist.release.files import REQUIRED_FILES
from dpdist.runs.archive import PUBLISHABLE, export_text, unpack_export
from dpdist.runs.folder import RunFolder

PUBLIC = {
    "recipe.yaml": b"name: x\n",
    "evaluation.json": b"{}",
    "report/index.html": b"<html>" + bytes(range(256)) * 100,
    "certificates/a/certificates.parquet": b"PAR1",
    **{f"release/{name}": b"w" for name in sorted(REQUIRED_FILES)},
}
PRIVATE = {
    "run.json": b'{"format": 2, "dpdist": "0"}',
    "private/run.key": b"secret",
    "private/ledger.jsonl": b"secret",
    "other/notes.txt": b"secret",
    "release/run.key": b"secret",
    "release/old/model.safetensors": b"secret",
}

# Names that lead out of a folder, or might on some file system.
OUTSIDE = (
    "../evil", "/etc/evil", "report/../../private/run.key", "", "private//run.key", "report/",
    "..\\evil", "report/\x01",
)  # fmt: skip


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


def test_publishable_files_come_home_and_private_ones_stay(run, tmp_path):
    log = f"chatter before\n{export_text(run)}\nchatter after\n"
    written = unpack_export(log, tmp_path / "home")
    assert contents(tmp_path / "home") == PUBLIC
    assert len(written) == len(PUBLIC)
    assert "private" not in PUBLISHABLE and "run.json" not in PUBLISHABLE


def test_a_release_folder_that_is_a_link_into_private_is_not_followed(run):
    (run.path / "attacks").symlink_to(run.private)
    raw = base64.b64decode("".join(export_text(run).splitlines()[1:-1]))
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        names = archive.getnames()
    assert names == sorted(PUBLIC, key=lambda name: PUBLISHABLE.index(name.split("/")[0]))
    assert not any(name.startswith("attacks") for name in names)


def test_a_damaged_log_gives_nothing(run, tmp_path):
    log = export_text(run)
    middle = len(log) // 2
    log = log[:middle] + ("A" if log[middle] != "A" else "B") + log[middle + 1 :]
    with pytest.raises(UserError):
        unpack_export(log, tmp_path / "home")
    assert not (tmp_path / "home").exists()


def crafted(*names: str) -> str:
    """Return a job's log with an export of these files and its correct digest."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
    digest = hashlib.blake2b(raw.getvalue(), digest_size=16).hexdigest()
    text = base64.b64encode(raw.getvalue()).decode()
    return f"-----BEGIN DPDIST EXPORT-----\n{text}\n-----END DPDIST EXPORT {digest}-----"


@pytest.mark.parametrize(
    "names",
    [
        *[(name,) for name in OUTSIDE],
        ("private/run.key",), ("Private/run.key",), ("release/run.key",), ("run.json",),
        ("report/index.html", "../evil"),
    ],
)  # fmt: skip
def test_a_file_that_has_no_business_there_is_refused(names, tmp_path):
    with pytest.raises(UserError):
        unpack_export(crafted(*names), tmp_path / "home")
    assert not (tmp_path / "home").exists() and not (tmp_path / "evil").exists()


def test_a_link_in_the_target_is_not_followed(run, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "home" / "recipe.yaml").symlink_to(tmp_path / "victim")
    unpack_export(export_text(run), tmp_path / "home")
    assert (tmp_path / "victim").read_text() == "mine"
    assert contents(tmp_path / "home") == PUBLIC


def test_weights_do_not_leave_without_their_card(run, tmp_path):
    (run.release_folder / "privacy_card.json").unlink()
    unpack_export(export_text(run), tmp_path / "home")
    assert not (tmp_path / "home" / "release").exists()
