"""Input that is invalid by construction: each case must be refused, as test_fuzz.py says."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from harness import call, cases, listing, read, run
from hostile import BASE, damage, restored
from hypothesis import strategies as st
from support.local_execution import run_without_ray as executed_here

from dpdist import pipeline
from dpdist.certification import table as certificates
from dpdist.certification import table_reader
from dpdist.cluster import job_folder
from dpdist.privacy.budget import DataBudget
from dpdist.privacy.ledger import Ledger
from dpdist.release.bundle import load as load_release
from dpdist.release.files import compute_checksums
from dpdist.release.verify import verify_release
from dpdist.runs.archive import Archive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    """A folder with a run, certified, and its release."""
    place = tmp_path_factory.mktemp("released")
    raw = copy.deepcopy(BASE) | {"method": {"name": "input-noise", "sigma": 0.5}}
    raw["certify"] |= {"n0": 10}
    (place / "x.yaml").write_text(yaml.safe_dump(raw))
    with pytest.MonkeyPatch.context() as patch:
        executed_here(patch)
        for command in (["run", "x.yaml"], ["release", "x", "--license", "Apache-2.0"]):
            code, said = run(place, *command)
            assert code == 0, said
    return place


def test_certificates(released, tmp_path):
    """A number of a row that does not follow from its counts, with the digest that goes with it."""
    path = tmp_path / "certificates.parquet"
    whole = next((released / "runs/x/certificates").rglob("certificates.parquet"))
    table = pq.read_table(whole)
    about = job_folder.read_job_record(table, certificates.KEY)
    names = ["radius", "p_lower", "k", "n", "label", "prediction", "index", "alpha", "sigma"]

    @cases(120, st.data())
    def one(data):
        draw, rows = data.draw, table.to_pylist()
        row, name = draw(st.sampled_from(rows)), draw(st.sampled_from(names))
        before = row[name]
        numbers = (
            [-1, 0, 1, 5, 10**9] if isinstance(before, int) else [0.0, 0.1, 5.0, -1.0, float("nan")]
        )
        row[name] = draw(st.sampled_from([value for value in numbers if value != before]))
        schema = table.schema.remove_metadata()
        job_folder.write_table(job_folder.build_table(rows, schema, about, certificates.KEY), path)
        read((name, before, row), lambda: table_reader.read(path), invalid=True)

    one()


def test_releases(released, tmp_path):
    """Any byte or file of a release changed, then its JSON with right sums."""
    place = tmp_path / "release"
    whole = released / "runs/x/release"
    names = sorted(path.name for path in whole.iterdir())

    def verify() -> None:
        verify_release(load_release(place))

    @cases(120, st.data())
    def one(data):
        restored(whole, place)
        name = data.draw(st.sampled_from(names))
        how = damage(place / name, data.draw)
        summed = name.endswith(".json") and how == "_edited" and data.draw(st.booleans())
        if summed:
            (place / "SHA256SUMS").write_text(compute_checksums(place))
        changed = summed or listing(place) != listing(whole)
        read((name, how, summed), verify, place=place, invalid=changed and not summed)

    one()


def _lines(path: Path, draw: Any) -> str:
    """Damage a journal whose lines are chained; returns how."""
    lines = path.read_bytes().splitlines(keepends=True)
    at = draw(st.integers(0, len(lines) - 1))
    kind = draw(st.sampled_from(["dropped", "swapped", "twice", "edited", "cut", "garbage"]))
    if kind == "swapped" and len(lines) > 1:
        other = (at + 1) % len(lines)
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == "twice":
        lines.insert(at, lines[at])
    elif kind == "edited":
        record = json.loads(lines[at])
        record["record"] = draw(st.sampled_from([{}, [], None, {"step": 1}, "x", {"kind": 1}]))
        lines[at] = json.dumps(record).encode() + b"\n"
    elif kind == "cut":
        lines[at:] = [lines[at][: draw(st.integers(0, len(lines[at]) - 1))]]
    elif kind == "garbage":
        lines.insert(at, draw(st.sampled_from([b"\n", b"{}\n", b"\xff\n", b"[" * 50_000 + b"\n"])))
    else:
        del lines[at]
    path.write_bytes(b"".join(lines))
    return f"{kind} {at}"


@pytest.mark.parametrize("kind", ["ledger", "budget"])
def test_journals(finished, tmp_path, kind):
    """Ledgers and budgets with lines gone, moved or changed, or files that are none."""
    place, whole = tmp_path / "work", tmp_path / "whole"
    reader: Callable[[Path], Any] = DataBudget.open
    if kind == "ledger":
        whole.mkdir()
        with Ledger.open(whole / "ledger.jsonl", "f" * 64) as ledger:
            ledger.begin_attempt({"code": "1"})
            for step in range(4):
                ledger.record(step, f"{step:064x}")
        reader = lambda path: Ledger.open(path, "f" * 64)  # noqa: E731
    else:
        shutil.copytree(finished.parent / "budgets", whole)
    journal = next(whole.glob("*.jsonl"))
    anchor = next(path for path in whole.iterdir() if path.suffix == ".anchor")

    @cases(120, st.data())
    def one(data):
        restored(whole, place)
        name = data.draw(st.sampled_from([journal.name, journal.name, anchor.name]))
        if name == journal.name and data.draw(st.booleans()):
            how = _lines(place / name, data.draw)
        else:
            how = damage(place / name, data.draw)
        changed = listing(place) != listing(whole)
        if name == anchor.name and (place / name).is_file():  # a line's end may be missing
            changed = (place / name).read_bytes().strip() != (whole / name).read_bytes().strip()
        read((name, how), lambda: reader(place / journal.name).close(), invalid=changed)

    one()


def test_archives(finished, tmp_path):
    """A manifest that is not the one that was written, or objects that it does not name."""
    work = tmp_path / "own"
    shutil.copytree(finished, work / "runs")
    archive = Archive.claim(
        pipeline.RunFolder(work / "runs" / "x"), f"file://{tmp_path}/store", True
    )
    assert archive is not None
    archive.update()
    whole, store, here = tmp_path / "whole", tmp_path / "store", tmp_path / "here"
    shutil.copytree(store, whole)
    here.mkdir()

    @cases(80, st.data())
    def one(data):
        restored(whole, store)
        files = sorted(path for path in store.rglob("*") if path.is_file())
        target = next(path for path in files if path.name == "manifest.json")
        if data.draw(st.booleans()):
            objects = [path for path in files if "private" in str(path.relative_to(store))]
            target = data.draw(st.sampled_from(objects))
        how = damage(target, data.draw)
        # A manifest of the right form has no sum of its own: the bucket is the user's.
        changed = target.name != "manifest.json" and listing(store) != listing(whole)
        url = f"file://{store}"
        call((target.name, how), here, "cluster", "fetch", "--restore", url, invalid=changed)
        shutil.rmtree(here)
        here.mkdir()

    one()
