"""A lost run folder is brought back from an S3 server, and no release is ever forgotten.

The loop is the one Ray Train runs, in a thread; a second thread does what the command does beside
it. "Lost" is a copy put aside at a random moment: it tells what the lost folder had released.
"""

from __future__ import annotations

import http.server
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.folder_contents import forge_manifest
from support.local_execution import command
from support.training import train_and_crash

from dpdist.cluster import object_store
from dpdist.cluster.object_store import ObjectNotFoundError, ObjectStore, check_url
from dpdist.core.errors import ClusterError, UserError
from dpdist.core.files import read_json
from dpdist.privacy.ledger import Anchor, Ledger
from dpdist.runs import archive as archives
from dpdist.runs.archive import Archive, Permit
from dpdist.runs.folder import RunFolder, complete_checkpoints
from dpdist.runs.recipe import Recipe, parse_recipe
from dpdist.training import worker
from dpdist.training.collectives import Reducer
from dpdist.training.job import prepare
from dpdist.training.worker import PermitGate

sys.path.insert(0, str(Path(__file__).parent))
import s3_guard
import s3_server

SECRET = "wJalrXUtnFEMI-secret"
STEPS = 200


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, str]]:
    """Addresses of an S3 server that answers everybody and of a guarded one, with a bucket."""
    program = s3_server.find_server()
    if program is None:
        pytest.skip("needs moto's S3 server (tests/s3_server.py says how)")
    from pyarrow import fs

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "tester")
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_REGION", "us-east-1")
        with s3_server.running(program) as url, s3_guard.guarded(url) as guard:
            fs.S3FileSystem(allow_bucket_creation=True, endpoint_override=url).create_dir("bucket")
            yield url, guard


@pytest.fixture(autouse=True)
def _short_permits(monkeypatch) -> None:
    """Fifty steps ahead, however fast they are."""
    monkeypatch.setattr(worker, "_AHEAD_SECONDS", 0.0)


@pytest.fixture
def url(server: tuple[str, str], request: pytest.FixtureRequest, monkeypatch) -> str:
    """A fresh prefix on the guarded server."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server[1])
    return f"s3://bucket/{abs(hash(request.node.name)):x}"


def make(tmp: Path, name: str = "run", steps: int = STEPS, **resources) -> tuple[Recipe, RunFolder]:
    raw = {
        "name": name,
        "data": {"name": "digits", "max_train": 200},
        "model": "linear",
        "privacy": {"noise_multiplier": 1.0, "delta": 1e-4},
        "training": {"batch_size": 10, "steps": steps, "learning_rate": 0.1},
        "resources": {"checkpoint_seconds": 0.3, **resources},
    }
    return parse_recipe(raw, "test"), RunFolder(tmp / "runs" / name)


class Stop(Exception):
    pass


@contextmanager
def training(
    recipe: Recipe, folder: RunFolder, hold: Callable[[int], None] = lambda step: None
) -> Iterator[threading.Thread]:
    """The loop in a thread; ended with an error at the next step when the block is left.

    `hold` is called with every step that has leave, before its release."""
    job = prepare(recipe, folder, "test")
    Archive.claim(folder, recipe.resources.archive, recipe.resources.archive_private)
    ended = threading.Event()
    gate = PermitGate.wait

    def wait(self: PermitGate, step: int) -> None:
        if ended.is_set():
            raise Stop
        gate(self, step)
        hold(step)

    def read(path: Path) -> Permit | None:  # what a waiting gate does again and again
        if ended.is_set():
            raise Stop
        return archives.read_permit(path)

    def work() -> None:
        with suppress(Stop):
            worker.run_training(job, Reducer(0, 1, torch.device("cpu")))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.PermitGate, "wait", wait)
        patch.setattr(worker, "read_permit", read)
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            ended.set()
            thread.join(30)


def released(folder: RunFolder) -> dict[int, int]:
    begun = folder.ledger.exists() and folder.ledger.stat().st_size > 0  # it is being written
    return Ledger.read(folder.ledger).release_counts if begun else {}


def follow_until(folder: RunFolder, condition, seconds: float = 60) -> None:
    archive = Archive.find(folder)
    look, end = archive.make_updater(lambda line: None), time.monotonic() + seconds
    while not condition(archive):
        assert time.monotonic() < end, "waited in vain"
        look()
        time.sleep(0.01)


def lose(recipe: Recipe, folder: RunFolder, steps: int) -> RunFolder:
    """Train for at least so many steps with the archive, go on without it, and lose the folder.

    Returns the lost folder: what it had released in the end."""
    alone = threading.Event()

    def hold(step: int) -> None:  # a step has leave that the archive sees no release of
        if step >= steps:
            alone.wait(60 if complete_checkpoints(folder.checkpoints) else 0.05)

    with training(recipe, folder, hold):
        follow_until(folder, lambda a: len(released(folder)) >= steps and a._checkpoint)
        alone.set()
        time.sleep(0.5)  # the archive hears nothing more
    lost = folder.path.with_name("lost")
    shutil.rmtree(lost, ignore_errors=True)
    folder.path.rename(lost)
    return RunFolder(lost)


@pytest.mark.slow
def test_nothing_is_released_before_the_archive_knows(tmp_path, url):
    recipe, folder = make(tmp_path, archive=url, archive_private=True)
    with training(recipe, folder) as thread:
        time.sleep(1.0)
        assert thread.is_alive() and not released(folder)
        assert Archive.claim(folder, url, True).store.list_names("00000001") == []
        follow_until(folder, lambda _: len(released(folder)) > 20)
        granted = archives.read_permit(folder.permit)
        assert granted.epoch == 0 and granted.step <= max(released(folder)) + 1
        time.sleep(0.5)
        assert max(released(folder)) < archives.read_permit(folder.permit).steps < STEPS


@pytest.mark.slow
def test_a_lost_run_is_restored_and_every_release_counts(tmp_path, url):
    recipe, folder = make(tmp_path, archive=url, archive_private=True)
    lost = lose(recipe, folder, 60)
    seen, old = released(lost), Ledger.read(lost.ledger)
    again, charged = archives.restore(url, tmp_path / "runs")
    assert again.path == folder.path and charged > 0
    restored = Ledger.read(folder.ledger)
    # Before it goes on: never less than the lost folder released.
    for step, count in seen.items():
        assert restored.release_counts.get(step, 0) >= count
    assert restored.attempts[-1]["reason"] == "restored from an archive"
    assert restored.nonce not in {attempt["nonce"] for attempt in old.attempts}
    assert oct(folder.run_key.stat().st_mode)[-3:] == "600"
    start = int(sorted(folder.checkpoints.glob("step-*"))[-1].name[5:])
    assert 0 < start <= max(seen) + 1

    with training(recipe, folder) as thread:
        follow_until(folder, lambda _: not thread.is_alive())
    assert folder.training_summary.exists()
    plan, final = prepare(recipe, folder, "test").plan, Ledger.read(folder.ledger)
    own = dict.fromkeys(range(start, STEPS), 1)
    for step in range(STEPS):
        assert final.release_counts[step] >= seen.get(step, 0) + own.get(step, 0)
    assert final.guarantee(plan).epsilon > old.guarantee(plan).epsilon
    assert final.guarantee(plan).epsilon > plan.guarantee().epsilon
    store = ObjectStore(url)
    assert store.list_names("00000001/files") == [] != store.list_names("00000002/files")

    # The folder that was not lost after all may not go on.
    for write in (lambda: Archive.claim(lost, url, True), Archive.find(lost).update):
        with pytest.raises(UserError, match=lost.name):
            write()


def read_archive(folder: RunFolder) -> dict:
    about = read_json(folder.archive)
    return json.loads(ObjectStore(about["url"]).get(f"{about['number']:08d}/manifest.json"))


@pytest.fixture
def archived(tmp_path, url) -> tuple[RunFolder, ObjectStore]:
    """An unfinished run's archive; its folder is lost."""
    recipe, folder = make(tmp_path, archive=url, archive_private=True)
    lose(recipe, folder, 40)
    return folder, ObjectStore(url)


def refused(folder: RunFolder, match: str) -> None:
    with pytest.raises(UserError, match=match):
        archives.restore(f"{folder_url(folder)}", folder.path.parent)
    assert not folder.path.exists()
    assert not list(folder.path.parent.glob(".*"))


def folder_url(folder: RunFolder) -> str:
    return read_json(RunFolder(folder.path.with_name("lost")).archive)["url"]


@pytest.mark.slow
def test_torn_and_damaged_archives_are_refused(archived):
    folder, store = archived
    good = store.get("00000001/manifest.json")
    entry = json.loads(good)["files"]["private/ledger.jsonl"]
    ledger = store.get(entry["object"])

    store.put(entry["object"], ledger[: len(ledger) // 2])
    refused(folder, "ledger.jsonl")
    store.put(entry["object"], ledger.replace(b"0", b"1", 1))
    refused(folder, "ledger.jsonl")
    store.delete(entry["object"])
    refused(folder, "ledger.jsonl")
    store.put(entry["object"], ledger)

    store.put("00000001/manifest.json", good[:-20])
    refused(folder, "manifest.json")
    store.put("00000001/manifest.json", good.replace(b'"permit"', b'"pormit"'))
    refused(folder, "permit")
    rewrite_with = good.replace(b"private/run.key", b"private/../../x")
    store.put("00000001/manifest.json", rewrite_with)
    forge_manifest(store, lambda manifest: None)
    refused(folder, "private/../../x")
    store.delete("00000001/manifest.json")
    refused(folder, "manifest")
    store.put("00000001/manifest.json", good)
    assert len(store.list_names("claims")) == 1  # no refused restore has taken it over
    assert archives.restore(store.url, folder.path.parent)[1] > 0


def replace(store: ObjectStore, path: str, content: bytes) -> None:
    """Another content for an archived file, with a digest that fits."""

    def change(manifest: dict) -> None:
        name = manifest["files"][path]["object"]
        digest, size = store.put(name, content)
        manifest["files"][path] = {"object": name, "digest": digest, "size": size}

    forge_manifest(store, change)


@pytest.mark.slow
def test_a_cut_ledger_is_refused_whatever_the_manifest_says(archived):
    """Cut at a line, so that its chain holds, and with digests that fit: header and attempt."""
    folder, store = archived
    files = json.loads(store.get("00000001/manifest.json"))["files"]
    whole = store.get(files["private/ledger.jsonl"]["object"])
    cut = b"".join(whole.splitlines(keepends=True)[:2])
    replace(store, "private/ledger.jsonl", cut)
    refused(folder, "ledger.jsonl")
    replace(store, "private/ledger.anchor", Anchor.from_journal_bytes(cut).file_line.encode())
    refused(folder, "checkpoint")


@pytest.mark.slow
def test_an_interrupted_upload_leaves_the_one_before(tmp_path, url, monkeypatch):
    recipe, folder = make(tmp_path, archive=url)
    prepare(recipe, folder, "test")
    archive = Archive.claim(folder, url, False)
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
    target, _ = archives.fetch_publishable_files(url, tmp_path / "fetched")
    assert (target / "report" / "index.html").read_text() == "first"
    archive.update()
    archives.fetch_publishable_files(url, tmp_path / "fetched")
    assert (target / "report" / "index.html").read_text() == "second, longer"
    kept = {entry["object"].split("/")[2] for entry in read_archive(folder)["files"].values()}
    reports = [
        token for token in archive.store.list_names("00000001/files")
        if archive.store.list_names(f"00000001/files/{token}/report")
    ]  # fmt: skip
    assert len(reports) == 2 and len(set(reports) & kept) == 1  # the torn one is left over


@pytest.mark.slow
def test_private_state_is_archived_only_when_asked(tmp_path, url):
    recipe, folder = make(tmp_path, steps=3, archive=url)
    with training(recipe, folder) as thread:
        thread.join(60)
    archive = Archive.find(folder)
    archive.update()
    names = set(read_archive(folder)["files"])
    assert "recipe.yaml" in names and not any(name.startswith("private") for name in names)
    for reader in (archives.restore, archives.open_archived_copy):
        with pytest.raises(UserError, match="archive_private"):
            reader(url, tmp_path / "elsewhere")
    wider = Archive.claim(folder, url, True)  # as a later command does
    wider.update()
    names = set(read_archive(folder)["files"])
    tokens = {entry["object"].split("/")[2] for entry in read_archive(folder)["files"].values()}
    in_use = [
        token for token in wider.store.list_names("00000001/files")
        if any(wider.store.list_names(f"00000001/files/{token}{below}") for below in ("",
            "/private"))
    ]  # fmt: skip
    assert set(in_use) == tokens  # what the process before had written is gone
    assert {"private/run.key", "private/ledger.jsonl", "private/trained.json", "run.json"} <= names
    assert not names & {"private/archive.json", "private/permit.json"}
    for address in (url, None):
        with pytest.raises(UserError, match=r"resources\.archive"):
            Archive.claim(folder, address, False)


@pytest.mark.slow
def test_a_finished_run_is_read_back_by_the_commands(tmp_path, url, monkeypatch, capsys):
    def dpdist(*arguments: object) -> tuple[int, str]:
        done = command(monkeypatch, capsys, tmp_path, *arguments)
        return done.code, done.out + done.err

    recipe, folder = make(tmp_path, steps=3, archive=url, archive_private=True)
    elsewhere = tmp_path / "elsewhere"
    code, said = dpdist("report", url, "--runs", elsewhere)
    assert code == 2 and url in said
    with training(recipe, folder) as thread:
        follow_until(folder, lambda archive: archive._checkpoint and len(released(folder)) == 3)
        thread.join(30)
        shutil.move(folder.training_summary, tmp_path / "trained.json")
        Archive.find(folder).update()
        code, said = dpdist("report", url, "--runs", elsewhere)
        assert (
            code == 2 and f"dpdist cluster fetch --restore {url}" in said and not elsewhere.exists()
        )
        shutil.move(tmp_path / "trained.json", folder.training_summary)
    Archive.find(folder).update()
    for _ in range(2):  # the copy that the first one made is opened again
        code, said = dpdist("report", url, "--runs", elsewhere)
        assert code == 0 and "epsilon = " in said, said
    copy = RunFolder(elsewhere / "run")
    assert copy.report_file.exists() and not copy.archive.exists()
    assert copy.ledger.read_bytes() == folder.ledger.read_bytes()
    code, said = dpdist("certify", url, "--runs", elsewhere)
    assert code == 2 and "certify.sigma" in said  # it read the run's recipe

    dpdist("report", "run", "--runs", folder.path.parent)  # the owner: the archive follows
    code, said = dpdist("cluster", "fetch", url, "--into", tmp_path / "fetched")
    here = tmp_path / "fetched" / "run"
    assert code == 0 and (here / "report" / "index.html").exists()
    assert not (here / "private").exists() and not (here / "run.json").exists()

    code, said = dpdist("cluster", "fetch", "--restore", url, "--into", folder.path.parent)
    assert code == 2 and str(folder.path) in said
    code, said = dpdist("cluster", "fetch", "--restore", url, "--into", tmp_path / "new")
    assert code == 0 and "charged" not in said and (tmp_path / "new" / "run").is_dir()
    code, said = dpdist("report", "run", "--runs", folder.path.parent)
    assert code == 2 and url in said


@pytest.mark.slow
def test_an_archive_that_everybody_can_read_gets_no_private_state(tmp_path, server, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", server[0])  # not guarded
    recipe, folder = make(tmp_path)
    prepare(recipe, folder, "test")
    with pytest.raises(UserError, match="archive_private"):
        Archive.claim(folder, "s3://bucket/open", True)
    assert (
        not folder.archive.exists() and ObjectStore("s3://bucket/open").list_names("claims") == []
    )
    assert Archive.claim(folder, "s3://bucket/open", False) is not None


@pytest.mark.slow
def test_two_runs_in_one_prefix_are_refused(tmp_path, url, monkeypatch):
    first, second = (make(tmp_path, name)[1] for name in ("first", "second"))
    for name in ("first", "second"):
        prepare(*make(tmp_path, name), "test")
    Archive.claim(first, url, False)
    Archive.claim(first, url, False)  # the same run again
    with pytest.raises(UserError, match=url):
        Archive.claim(second, url, False)
    # At the same moment: the second claims between the first one's look and its claim.
    other = f"{url}-race"
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


@pytest.mark.slow
def test_two_that_restore_at_once_both_give_way(archived, monkeypatch):
    """Somebody's claim comes between the look at the claims and the own one."""
    folder, store = archived
    put = ObjectStore.put

    def claimed_too(self, name, source):
        found = put(self, name, source)
        if name.startswith("claims/"):
            put(self, "claims/00000002-somebody", b"{}")
        return found

    monkeypatch.setattr(ObjectStore, "put", claimed_too)
    refused(folder, store.url)
    assert (
        "00000002-somebody" in store.list_names("claims") and len(store.list_names("claims")) == 2
    )


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


def test_a_silent_store_stops_the_training_in_the_end(tmp_path, url, monkeypatch):
    recipe, folder = make(tmp_path, archive=url, archive_private=True)
    prepare(recipe, folder, "test")
    archive = Archive.claim(folder, url, True)
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
    "address",
    [
        f"s3://me:{SECRET}@bucket/x",
        f"s3://bucket/x?secret_key={SECRET}",
        "s3://bucket",
        "ftp://a/b",
    ],
)
def test_addresses_that_cannot_be_used_are_explained(tmp_path, address, dpdist):
    with pytest.raises(ClusterError) as error:
        check_url(address)
    assert SECRET not in str(error.value)
    done = dpdist("run", "digits", "--set", f"resources.archive={address}", "--runs", tmp_path)
    assert done.code == 2 and SECRET not in done.out + done.err
    assert "archive" in done.err or "must be s3" in done.err


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


def test_an_object_that_cannot_be_written_whole_leaves_the_one_before(tmp_path):
    store = ObjectStore(f"file://{tmp_path}/store")
    whole = store.put("a/b", b"as it was")
    with pytest.raises(ClusterError):
        store.put("a/b", tmp_path / "gone")
    assert store.get("a/b") == b"as it was"
    assert store.download("a/b", tmp_path / "copy", 100) == whole
    assert [path.name for path in (tmp_path / "store" / "a").iterdir()] == ["b"]


def test_a_killed_writer_s_part_is_no_object(tmp_path, monkeypatch):
    """A claim's part counted as another run's claim, or ended every later command."""
    store = ObjectStore(f"file://{tmp_path}/store")

    class Killed(object_store.ObjectStore):
        def __init__(self) -> None:
            super().__init__(f"file://{tmp_path}/store")
            self._fs = self

        def create_dir(self, *_: object, **__: object) -> None:
            (tmp_path / "store" / "claims").mkdir(parents=True)

        def open_output_stream(self, path: str) -> Any:
            return open(path, "wb")

        def move(self, *_: object) -> None:
            raise OSError("killed")

        def delete_file(self, _: str) -> None:
            raise OSError("killed")

    with pytest.raises(ClusterError, match="killed"):
        Killed().put("claims/00000001-mine", b"{}")
    assert len(list((tmp_path / "store" / "claims").iterdir())) == 1
    assert store.list_names("claims") == []


class Bucket(http.server.BaseHTTPRequestHandler):
    """Every object is one byte; whoever signs reads it, and all others where its name says so."""

    def do_HEAD(self) -> None:
        read = "/open/" in self.path or "Authorization" in self.headers
        self.send_response(200 if read else 403)
        self.send_header("Content-Length", "1")
        self.send_header("Last-Modified", "Thu, 01 Jan 1970 00:00:00 GMT")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.wfile.write(b"x")

    def log_message(self, *about: object) -> None:
        pass


@pytest.mark.slow
def test_whether_an_object_is_read_by_all_is_tried_without_credentials(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.setenv(name, "true")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        where = f"region=us-east-1&scheme=http&endpoint_override=127.0.0.1:{server.server_port}"
        for prefix in ("open", "closed"):
            store = ObjectStore(f"s3://bucket/{prefix}?{where}")
            assert store.is_public("claims/x") == (prefix == "open")
    finally:
        server.shutdown()
        server.server_close()
    local = ObjectStore(f"file://{tmp_path}/open")
    local.put("a", b"x")
    assert not local.is_public("a")


def test_an_object_is_written_no_further_than_its_manifest_says(tmp_path):
    store = ObjectStore(f"file://{tmp_path}/store")
    store.put("a", bytes(10 * 2**20))
    target = tmp_path / "out"
    assert store.download("a", target, 10)[1] == 11
    assert target.stat().st_size == 11
    with pytest.raises(ClusterError, match="10 bytes"):
        store.get("a", 10)


def kept_in(url: str) -> dict[str, Any]:
    return archives.newest_manifest(ObjectStore(url))[1].files


def test_what_is_kept_is_whole_and_the_run_s_own(tmp_path):
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
    url = f"file://{tmp_path}/store"
    archive = Archive.claim(folder, url, True)
    archive.update()
    files = kept_in(url)
    assert "private/own" in files
    assert not [path for path in files if "link" in path or "partial" in path]
    assert ObjectStore(url).get(files["private/ledger.jsonl"].object) == whole


def test_the_newest_manifest_is_read_and_names_what_was_asked(tmp_path):
    recipe, folder = make(tmp_path)
    prepare(recipe, folder, "test")
    url = f"file://{tmp_path}/store"
    archive = Archive.claim(folder, url, True)
    archives.write_json(folder.permit, {"epoch": 0, "step": 0, "steps": 1})
    archives.write_json(folder.permit_request, {"epoch": 0, "step": 1, "steps": 7})
    assert archive.update() == Permit(epoch=0, step=1, steps=7)
    store = ObjectStore(url)
    assert archives.newest_manifest(store)[1].permit == Permit(epoch=0, step=1, steps=7)
    body = archives.newest_manifest(store)[1].model_dump()
    store.put(f"claims/{archives.make_claim(2)}", b"{}")
    later = {**body, "files": {}, "permit": {"epoch": 1, "step": 0, "steps": 2}}
    store.put(f"{archives.claim_folder(2)}/{archives.MANIFEST}", archives.encode_manifest(later))
    number, manifest = archives.newest_manifest(store)
    assert (number, manifest.permit) == (2, Permit(epoch=1, step=0, steps=2))


def test_every_step_with_leave_is_charged_when_a_run_is_restored(tmp_path, monkeypatch):
    """The first one too, in the attempt that has leave whatever others released, and by the
    manifest that the old owner wrote last before it was replaced."""
    recipe, folder = make(tmp_path, steps=6)
    train_and_crash(recipe, folder, monkeypatch, 4)  # right after the entry of step 4
    assert released(folder) == dict.fromkeys(range(5), 1)
    url = f"file://{tmp_path}/store"
    archive = Archive.claim(folder, url, True)

    def ask(folder: RunFolder, archive: Archive, epoch: int, step: int) -> None:
        archives.write_json(folder.permit_request, {"epoch": epoch, "step": step, "steps": 6})
        assert archive.update() == Permit(epoch=epoch, step=step, steps=6)

    ask(folder, archive, 0, 5)
    archive.store.put(f"claims/{archives.make_claim(2)}", b"{}")  # whose owner came no further
    again, charged = archives.restore(url, tmp_path / "again")
    assert charged == 1 and released(again) == dict.fromkeys(range(6), 1)

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
    last, charged = archives.restore(url, tmp_path / "last")
    assert charged == 4
    assert released(last) == {0: 1, 1: 1, 2: 2, 3: 2, 4: 2, 5: 2}
    with pytest.raises(UserError, match=url):
        owner.update()


@pytest.mark.slow
def test_without_the_permit_releases_would_be_forgotten(tmp_path, url, monkeypatch):
    """The check above can fail: a gate that lets everything pass loses releases."""
    recipe, folder = make(tmp_path, steps=5_000, archive=url, archive_private=True)
    ask = PermitGate._ask

    def open_gate(self: PermitGate, step: int) -> None:
        ask(self, step)
        self._granted = 5_000

    monkeypatch.setattr(PermitGate, "_ask", open_gate)
    with training(recipe, folder):
        follow_until(folder, lambda archive: archive._checkpoint)
        end = archives.read_permit(folder.permit).steps + 20
        until = time.monotonic() + 60
        while len(released(folder)) < end and time.monotonic() < until:
            time.sleep(0.01)
    lost = RunFolder(folder.path.rename(folder.path.with_name("lost")))
    archives.restore(url, tmp_path / "runs")
    restored = released(folder)
    assert any(restored.get(step, 0) < count for step, count in released(lost).items())
