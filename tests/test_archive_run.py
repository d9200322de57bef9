"""The commands on a real S3 server: train with an archive, lose the host, restore, go on; read the
finished run back from elsewhere. What is lost ran on Ray; the rest runs in this process."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.local_execution import command, run_without_ray
from support.processes import kill, slow_fsync_environment, start, steps_done, wait_for
from support.recipes import write_recipe
from support.settings import sets

from dpdist.cluster.object_store import ObjectNotFoundError, ObjectStore
from dpdist.privacy.ledger import Ledger

sys.path.insert(0, str(Path(__file__).parent))
import s3_guard
import s3_server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SECRET = "wJalrXUtnFEMI-secret"
STEPS = 150


@pytest.fixture
def server(monkeypatch) -> Iterator[None]:
    program = s3_server.find_server()
    if program is None:
        pytest.skip("needs moto's S3 server (tests/s3_server.py says how)")
    from pyarrow import fs

    with s3_server.running(program) as url, s3_guard.guarded(url) as guard:
        open_store = fs.S3FileSystem(
            access_key="tester", secret_key=SECRET, region="us-east-1", endpoint_override=url,
            allow_bucket_creation=True,
        )  # fmt: skip
        open_store.create_dir("bucket")
        for name, value in {
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": guard,
            "OMP_NUM_THREADS": "1",
        }.items():
            monkeypatch.setenv(name, value)
        yield


def recipe(tmp_path: Path) -> Path:
    raw = {
        "name": "small",
        "data": {"name": "digits"},
        "model": "linear",
        "privacy": {"noise_multiplier": 2.0, "delta": 1e-4},
        "training": {"batch_size": 50, "steps": STEPS, "learning_rate": 0.2},
        "resources": {"checkpoint_seconds": 0.5},
    }
    return write_recipe(tmp_path, raw)


def test_a_lost_host_a_restored_run_and_a_reader_elsewhere(tmp_path, server, monkeypatch, capsys):
    address = "s3://bucket/runs/small"
    runs = tmp_path / "runs"
    run = runs / "small"

    def dpdist(*arguments: object, code: int = 0) -> str:
        done = command(monkeypatch, capsys, tmp_path, *arguments)
        said = done.out + done.err
        assert done.code == code and SECRET not in said, said
        return said

    def kept() -> bool:
        """Whether the archive has a checkpoint. (moto's server may show an object while it is being
        replaced, which S3 does not.)"""
        try:
            manifest = json.loads(ObjectStore(address).get("00000001/manifest.json"))
        except (ObjectNotFoundError, json.JSONDecodeError):
            return False
        return any(name.startswith("private/checkpoints/") for name in manifest["files"])

    archive = sets("resources", f"archive={address}", "archive_private=true")
    train = ["run", recipe(tmp_path), *archive]
    process = start(*train, cwd=tmp_path, **slow_fsync_environment(tmp_path))
    wait_for(lambda: steps_done(run) >= 20 and kept(), process=process)
    said = kill(process)
    assert SECRET not in said
    released = Ledger.read(run / "private" / "ledger.jsonl").release_counts
    everything = b"".join(p.read_bytes() for p in run.rglob("*") if p.is_file())
    assert SECRET.encode() not in everything
    shutil.rmtree(run)

    run_without_ray(monkeypatch)
    assert address in dpdist(*train, code=2)
    assert not run.exists()
    assert "--restore" in dpdist("report", address, code=2)
    dpdist("cluster", "fetch", "--restore", address)
    before = Ledger.read(run / "private" / "ledger.jsonl").release_counts
    assert all(before[step] >= count for step, count in released.items())
    dpdist(*train)
    trained = json.loads((run / "private" / "trained.json").read_text())
    assert trained["reexecuted_releases"] > 0

    # Elsewhere: a finished run is read back, certified and reported.
    elsewhere = tmp_path / "elsewhere"
    said = dpdist("report", address, "--runs", elsewhere)
    assert "epsilon" in said and (elsewhere / "small" / "report" / "index.html").exists()
    certify = ["certify", address, "--runs", elsewhere, "--sigma", 0.25, "--n", 200]
    assert "Certified accuracy" in dpdist(*certify, "--set", "certify.max_inputs=4")
    dpdist("cluster", "fetch", address, "--into", tmp_path / "fetched")
    here = tmp_path / "fetched" / "small"
    assert (here / "report" / "index.html").exists() and not (here / "private").exists()
