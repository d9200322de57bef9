"""A lost run folder is brought back from an archive, and no release is ever forgotten."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3_server
import torch
from support.folder_contents import contents
from support.local_execution import command
from support.training import train, train_and_crash

from dpdist.cluster.object_store import ObjectNotFoundError, ObjectStore
from dpdist.core.errors import ClusterError, UserError
from dpdist.privacy.ledger import Ledger
from dpdist.runs import archive as archives
from dpdist.runs.archive import Archive, Permit
from dpdist.runs.folder import RunFolder
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.worker import PermitGate

SECRET = "wJalrXUtnFEMI-secret"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server that answers everybody, with a bucket."""
    program = s3_server.find_server()
    if program is None:
        pytest.skip("needs moto's S3 server (tests/s3_server.py says how)")
    from pyarrow import fs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "tester")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_REGION", "us-east-1")
        with s3_server.running(program) as url:
            fs.S3FileSystem(allow_bucket_creation=True, endpoint_override=url).create_dir("bucket")
            yield url


@pytest.fixture(autouse=True)
def _short_permits(monkeypatch) -> None:
    """Fifty steps ahead, however fast they are."""
    monkeypatch.setattr(worker, "_AHEAD_SECONDS", 0.0)


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    """A store in a folder."""
    return f"file://{tmp_path}/store"


@pytest.fixture
def url(server: str, request: pytest.FixtureRequest, monkeypatch) -> str:
    """A fresh prefix on the server, as if it were closed to others."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setattr(ObjectStore, "is_public", lambda *_: False)
    return f"s3://bucket/{abs(hash(request.node.name)):x}"


def make(tmp: Path, name: str = "run", steps: int = 120, **resources) -> tuple[Recipe, RunFolder]:
    raw = {
        "name": name,
        "data": {"name": "digits", "max_train": 200},
        "model": "linear",
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"batch_size": 10, "steps": steps, "learning_rate": 0.1},
        "resources": {"checkpoint_seconds": 0.3, **resources},
    }
    return parse_recipe(raw, "test"), RunFolder(tmp / "runs" / name)


def released(folder: RunFolder) -> dict[int, int]:
    begun = folder.ledger.exists() and folder.ledger.stat().st_size > 0  # it is being written
    return Ledger.read(folder.ledger).release_counts if begun else {}


def test_nothing_is_released_before_the_archive_knows(tmp_path, store_url):
    recipe, folder = make(tmp_path, steps=12, archive=store_url, archive_private=True)
    job = prepare(recipe, folder, "test")
    Archive.claim(folder, store_url, True)
    archives.write_json(folder.permit, {"epoch": 0, "step": 0, "steps": 5})
    work = threading.Thread(
        target=worker.run_training, args=(job, Reducer(0, 1, torch.device("cpu"))), daemon=True
    )
    work.start()
    for _ in range(200):
        time.sleep(0.1)
        if len(released(folder)) >= 5:
            break
    time.sleep(0.5)
    assert sorted(released(folder)) == [0, 1, 2, 3, 4] and work.is_alive()
    asked = archives.read_permit(folder.permit_request)
    assert asked is not None and asked.steps > 5
    archives.write_json(folder.permit, {"epoch": 0, "step": 5, "steps": 12})
    work.join(30)
    assert not work.is_alive() and sorted(released(folder)) == list(range(12))


def kept_in(url: str) -> dict[str, Any]:
    return archives.newest_manifest(ObjectStore(url))[1].files


def test_an_interrupted_upload_leaves_the_one_before(tmp_path, store_url, monkeypatch):
    recipe, folder = make(tmp_path, archive=store_url)
    prepare(recipe, folder, "test")
    archive = Archive.claim(folder, store_url, False)
    (folder.path / "report").mkdir()
    folder.report_file.write_text("first")
    archive.update()
    folder.report_file.write_text("second, longer")
    put = ObjectStore.put

    def fail_on_manifest(self, name, source):
        if name.endswith("manifest.json"):
            raise ClusterError("the network is gone")
        return put(self, name, source)

    monkeypatch.setattr(ObjectStore, "put", fail_on_manifest)
    with pytest.raises(ClusterError, match="network"):
        archive.update()
    monkeypatch.setattr(ObjectStore, "put", put)
    target, _ = archives.fetch_publishable_files(store_url, tmp_path / "fetched")
    assert (target / "report" / "index.html").read_text() == "first"
    archive.update()
    archives.fetch_publishable_files(store_url, tmp_path / "fetched")
    assert (target / "report" / "index.html").read_text() == "second, longer"


def test_private_state_is_archived_only_when_asked(tmp_path, store_url):
    folder = make(tmp_path, steps=3, archive=store_url)[1]
    train(*make(tmp_path, steps=3))
    Archive.claim(folder, store_url, False).update()
    names = set(kept_in(store_url))
    assert "recipe.yaml" in names and not any(name.startswith("private") for name in names)
    for reader in (archives.restore, archives.open_archived_copy):
        with pytest.raises(UserError, match="archive_private"):
            reader(store_url, tmp_path / "elsewhere")
    Archive.claim(folder, store_url, True).update()  # as a later command does
    names = set(kept_in(store_url))
    assert {"private/run.key", "private/ledger.jsonl", "private/trained.json", "run.json"} <= names
    assert not names & {"private/archive.json", "private/permit.json"}
    for address in (store_url, None):
        with pytest.raises(UserError, match=r"resources\.archive"):
            Archive.claim(folder, address, False)


@pytest.mark.slow
def test_a_finished_run_is_read_back_by_the_commands(tmp_path, url, monkeypatch, capsys):
    def dpdist(*arguments: object) -> tuple[int, str]:
        done = command(monkeypatch, capsys, tmp_path, *arguments)
        assert SECRET not in done.out + done.err
        return done.code, done.out + done.err

    recipe, folder = make(tmp_path, steps=3)
    train(recipe, folder)
    archive = Archive.claim(folder, url, True)
    summary = folder.training_summary.rename(tmp_path / "trained.json")
    archive.update()
    elsewhere = tmp_path / "elsewhere"
    assert dpdist("report", url, "--runs", elsewhere)[0] == 2 and not elsewhere.exists()
    summary.rename(folder.training_summary)
    archive.update()
    for _ in range(2):  # the copy that the first one made is opened again
        code, said = dpdist("report", url, "--runs", elsewhere)
        assert code == 0 and "epsilon = " in said, said
    copy = RunFolder(elsewhere / "run")
    assert copy.report_file.exists() and not copy.archive.exists()
    assert copy.ledger.read_bytes() == folder.ledger.read_bytes()
    assert not any(SECRET.encode() in raw for raw in contents(folder.path).values())

    dpdist("report", "run", "--runs", folder.path.parent)  # the owner: the archive follows
    code, said = dpdist("cluster", "fetch", url, "--into", tmp_path / "fetched")
    here = tmp_path / "fetched" / "run"
    assert code == 0 and (here / "report" / "index.html").exists()
    assert not (here / "private").exists() and not (here / "run.json").exists()

    restore = ("cluster", "fetch", "--restore", url, "--into")
    assert dpdist(*restore, folder.path.parent)[0] == 2
    assert dpdist(*restore, tmp_path / "new")[0] == 0 and (tmp_path / "new" / "run").is_dir()
    assert dpdist("report", "run", "--runs", folder.path.parent)[0] == 2


@pytest.mark.slow
def test_an_archive_that_everybody_can_read_gets_no_private_state(tmp_path, server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    recipe, folder = make(tmp_path)
    prepare(recipe, folder, "test")
    with pytest.raises(UserError, match="archive_private"):
        Archive.claim(folder, "s3://bucket/open", True)
    assert (
        not folder.archive.exists() and ObjectStore("s3://bucket/open").list_names("claims") == []
    )
    assert Archive.claim(folder, "s3://bucket/open", False) is not None


def test_two_runs_in_one_prefix_are_refused(tmp_path, store_url, monkeypatch):
    first, second = (make(tmp_path, name)[1] for name in ("first", "second"))
    for name in ("first", "second"):
        prepare(*make(tmp_path, name), "test")
    Archive.claim(first, store_url, False)
    Archive.claim(first, store_url, False)  # the same run again
    with pytest.raises(UserError, match=store_url):
        Archive.claim(second, store_url, False)
    # At the same moment: the second claims between the first one's look and its claim.
    other = f"{store_url}-race"
    put = ObjectStore.put

    def claim_too(self, name, source):
        if name.startswith("claims/"):
            put(self, "claims/00000001-somebody", b"{}")
        return put(self, name, source)

    monkeypatch.setattr(ObjectStore, "put", claim_too)
    with pytest.raises(UserError, match=other):
        Archive.claim(second, other, False)
    assert ObjectStore(other).list_names("claims") == ["00000001-somebody"]
    assert not second.archive.exists()


def test_two_that_restore_at_once_both_give_way(tmp_path, store_url, monkeypatch):
    """Somebody's claim comes between the look at the claims and the own one."""
    recipe, folder = make(tmp_path, steps=6)
    train_and_crash(recipe, folder, monkeypatch, 4)
    Archive.claim(folder, store_url, True).update()
    put = ObjectStore.put

    def claimed_too(self, name, source):
        found = put(self, name, source)
        if name.startswith("claims/"):
            put(self, "claims/00000002-somebody", b"{}")
        return found

    monkeypatch.setattr(ObjectStore, "put", claimed_too)
    with pytest.raises(UserError, match=store_url):
        archives.restore(store_url, tmp_path / "again")
    assert not list((tmp_path / "again").glob("**/*"))
    claims = ObjectStore(store_url).list_names("claims")
    assert "00000002-somebody" in claims and len(claims) == 2


def test_a_new_attempt_needs_its_own_permit(tmp_path):
    folder = make(tmp_path)[1]
    folder.private.mkdir(parents=True)
    folder.archive.write_text(json.dumps({"private": True}))
    folder.permit.write_text(json.dumps({"epoch": 0, "step": 0, "steps": 100}))
    folder.permit_request.write_text(folder.permit.read_text())
    PermitGate(folder, 0, 30, 200).wait(99)
    # Leave that was given stays asked for after a restart: the archive must not forget it.
    asked = archives.read_permit(folder.permit_request)
    assert asked.step == 99 and asked.steps >= 149
    PermitGate(folder, 0, 30, 200).wait(30)
    assert archives.read_permit(folder.permit_request) == Permit(
        epoch=0, step=30, steps=asked.steps
    )
    gate = PermitGate(folder, 1, 30, 200)
    waiting = threading.Thread(target=gate.wait, args=(30,), daemon=True)
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive()
    folder.permit.write_text(json.dumps({"epoch": 1, "step": 30, "steps": 80}))
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_silent_store_stops_the_training_in_the_end(tmp_path, store_url, monkeypatch):
    recipe, folder = make(tmp_path, archive=store_url, archive_private=True)
    prepare(recipe, folder, "test")
    archive = Archive.claim(folder, store_url, True)
    folder.permit_request.write_text(json.dumps({"epoch": 0, "step": 0, "steps": 50}))
    clock = [1000.0]
    monkeypatch.setattr(archives.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ObjectStore, "put", lambda *_: (_ for _ in ()).throw(ClusterError("no")))
    said: list[str] = []
    look = archive.make_updater(said.append)
    look()
    assert len(said) == 1 and not folder.permit.exists()
    clock[0] += 601
    with pytest.raises(ClusterError, match="no; "):
        look()


@pytest.mark.parametrize(
    "address", [f"s3://me:{SECRET}@bucket/x", f"s3://bucket/x?secret_key={SECRET}"]
)
def test_credentials_in_an_address_are_refused_and_not_repeated(tmp_path, address, dpdist):
    done = dpdist("run", "digits", "--set", f"resources.archive={address}", "--runs", tmp_path)
    assert done.code == 2 and SECRET not in done.out + done.err


@pytest.mark.slow
def test_objects_are_whole(url, tmp_path):
    store = ObjectStore(url)
    (tmp_path / "in").write_bytes(bytes(range(256)) * 50_000)  # 12.8 MB: in several parts
    written = store.put("a/b", tmp_path / "in")
    assert store.download("a/b", tmp_path / "out", written[1]) == written
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    assert store.list_names("a") == ["b"] and store.list_names("nothing") == []
    store.delete("a/b")
    store.delete("a/b")
    with pytest.raises(ObjectNotFoundError):
        store.get("a/b")


def test_what_is_kept_is_whole_and_the_run_s_own(tmp_path, store_url):
    """No torn last line of the ledger, no file that is being written, and none that a link in
    private/ leads to."""
    recipe, folder = make(tmp_path)
    prepare(recipe, folder, "test")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("not of this run")
    (folder.private / "below").mkdir()
    for place in (folder.private, folder.private / "below"):
        (place / "folder-link").symlink_to(tmp_path / "elsewhere")
        (place / "link").symlink_to(tmp_path / "elsewhere" / "file")
    (folder.private / ".partial").write_text("half of a file")
    (folder.private / "own").write_text("of this run")
    whole = folder.ledger.read_bytes() if folder.ledger.exists() else b"{}\n"
    folder.ledger.write_bytes(whole + b'{"torn": ')
    archive = Archive.claim(folder, store_url, True)
    archive.update()
    files = kept_in(store_url)
    assert "private/own" in files
    assert not [path for path in files if "link" in path or "partial" in path]
    assert ObjectStore(store_url).get(files["private/ledger.jsonl"].object) == whole


def test_every_step_with_leave_is_charged_when_a_run_is_restored(tmp_path, store_url, monkeypatch):
    """The first one too, in the attempt that has leave whatever others released, and by the
    manifest that the old owner wrote last before it was replaced."""
    recipe, folder = make(tmp_path, steps=6)
    train_and_crash(recipe, folder, monkeypatch, 4)  # right after the entry of step 4
    assert released(folder) == dict.fromkeys(range(5), 1)
    archive = Archive.claim(folder, store_url, True)

    def ask(folder: RunFolder, archive: Archive, epoch: int, step: int) -> None:
        archives.write_json(folder.permit_request, {"epoch": epoch, "step": step, "steps": 6})
        assert archive.update() == Permit(epoch=epoch, step=step, steps=6)

    ask(folder, archive, 0, 5)
    archive.store.put(f"claims/{archives.make_claim(2)}", b"{}")  # whose owner came no further
    again, charged = archives.restore(store_url, tmp_path / "again")
    assert charged == 1 and released(again) == dict.fromkeys(range(6), 1)
    before, restored = Ledger.read(folder.ledger), Ledger.read(again.ledger)
    assert restored.nonce not in {attempt["nonce"] for attempt in before.attempts}
    assert oct(again.run_key.stat().st_mode)[-3:] == "600"

    owner = Archive.find(again)
    assert owner is not None
    ask(again, owner, 1, 4)
    put = ObjectStore.put

    def meanwhile(self, name, source):
        if name.startswith("claims/"):
            monkeypatch.setattr(ObjectStore, "put", put)
            ask(again, owner, 1, 2)
        return put(self, name, source)

    monkeypatch.setattr(ObjectStore, "put", meanwhile)
    last, charged = archives.restore(store_url, tmp_path / "last")
    assert charged == 4
    assert released(last) == {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2}
    plan = last.read_plan()
    assert Ledger.read(last.ledger).guarantee(plan).epsilon > plan.guarantee().epsilon
    with pytest.raises(UserError, match=store_url):
        owner.update()
