"""The names in an archive stay inside. On a file system; the loop runs for real."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.folder_contents import contents, forge_manifest
from support.training import make, train
from test_exporting import OUTSIDE

from dpdist.cluster.object_store import ObjectStore
from dpdist.core.errors import ClusterError, UserError
from dpdist.runs import archive as archives
from dpdist.runs.archive import Archive
from dpdist.runs.folder import RunFolder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunFolder:
    recipe, folder = make(
        tmp_path_factory.mktemp("runs"), "x", data__max_train=40, training__batch_size=10,
        training__steps=2, model="linear",
    )  # fmt: skip
    train(recipe, folder)
    folder.evaluation.write_text('{"accuracy": 1}')
    return folder


@pytest.fixture
def archived(finished, tmp_path) -> ObjectStore:
    folder = RunFolder(tmp_path / "mine" / "x")
    shutil.copytree(finished.path, folder.path)
    archive = Archive.claim(folder, f"file://{tmp_path}/store", True)
    assert archive is not None
    archive.update()
    return archive.store


def refused(store: ObjectStore, tmp_path: Path, match: str) -> None:
    """By all three that read an archive, and nothing is left anywhere."""
    before = contents(tmp_path)
    for reader in (archives.restore, archives.open_archived_copy, archives.fetch_publishable_files):
        with pytest.raises((UserError, ClusterError), match=match):
            reader(store.url, tmp_path / "inside" / "runs")
        assert contents(tmp_path) == before, reader
        assert not [p for p in (tmp_path / "inside").rglob("*") if p.is_file()]


@pytest.mark.parametrize("name", ["../evil", "x/y", "", None])
def test_the_runs_name_cannot_lead_out(archived, tmp_path, name):
    forge_manifest(archived, lambda manifest: manifest.update(run=name))
    refused(archived, tmp_path, "damaged")


def renamed(path: str, to: str) -> Callable[[dict], None]:
    def change(manifest: dict) -> None:
        manifest["files"][to] = manifest["files"][path]

    return change


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_files_name_cannot_lead_out(archived, tmp_path, name):
    forge_manifest(archived, renamed("private/run.key", name))
    refused(archived, tmp_path, "damaged")


def test_objects_outside_the_prefix_are_not_read(archived, tmp_path):
    (tmp_path / "mine" / "secret").write_text("secret")
    for name in ("../mine/secret", "00000001/files/../../../mine/secret", "/etc/passwd"):
        forge_manifest(archived, lambda m, name=name: m["files"]["recipe.yaml"].update(object=name))
        refused(archived, tmp_path, "damaged")
    for reach in (archived.get, archived.delete):
        with pytest.raises(ClusterError, match="secret"):
            reach("../mine/secret")
    archived.put("claims/readme", b"")
    refused(archived, tmp_path, "claims/")


def test_links_in_the_target_are_not_followed(archived, tmp_path):
    victim, into = tmp_path / "victim", tmp_path / "fetched"
    victim.write_text("mine")
    (into / "x").mkdir(parents=True)
    (into / "x" / "recipe.yaml").symlink_to(victim)
    archives.fetch_publishable_files(archived.url, into)
    assert victim.read_text() == "mine" and not (into / "x" / "recipe.yaml").is_symlink()


@pytest.mark.parametrize("command", ["fetch_publishable_files", "restore"])
def test_a_refused_archive_leaves_nothing(archived, tmp_path, command):
    entry = json.loads(archived.get("00000001/manifest.json"))["files"]["recipe.yaml"]["object"]
    target = tmp_path / "store" / entry
    target.write_bytes(target.read_bytes() + b"#")
    claims = archived.list_names("claims")
    with pytest.raises((UserError, ClusterError), match=r"recipe\.yaml"):
        getattr(archives, command)(archived.url, tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists() and archived.list_names("claims") == claims
