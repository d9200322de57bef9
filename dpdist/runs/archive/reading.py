"""From an archive back to files: restore a lost run, copy a finished one, fetch what is public."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpdist.base.errors import UserError
from dpdist.base.fields import check_run_name
from dpdist.base.reading import read_json
from dpdist.base.storage import built_aside, moved_in, private_folder, write_json
from dpdist.cluster.objectstore import Missing, ObjectStore
from dpdist.privacy.journal import JournalError
from dpdist.privacy.ledger import Ledger
from dpdist.runs.archive.layout import new_claim, newest, number_of, permit_of
from dpdist.runs.exporting import is_publishable
from dpdist.runs.folder import RunFolder, open_run
from dpdist.runs.released import begun, read_released


def is_address(run: str) -> bool:
    """Whether a run is named by the address of its archive."""
    return "://" in run


def open_anywhere(run: str, runs: Path) -> RunFolder:
    """The run folder by path or name, or a copy under `runs` of a finished run's archive.

    Raises UserError when there is none, ClusterError when the store does not answer.
    """
    return read_copy(run, runs) if is_address(run) else open_run(run, runs)


def restore(url: str, runs: Path, name: str | None = None) -> tuple[RunFolder, int]:
    """Bring a lost run folder back and take its archive over; the folder and how many steps were
    charged that the lost one may have released.

    Raises UserError for an archive that is incomplete, damaged, or without private state;
    ClusterError when the store does not answer. The folder is whole or not there.
    """
    store = ObjectStore(url)
    number, manifest = _whole(store)
    try:
        folder = _free(RunFolder(runs / check_run_name(name or manifest["run"])))
    except ValueError as error:
        raise UserError(f"--name: {error}, got {name!r}") from None
    number = max(number, *(number_of(claim) for claim in store.names("claims"))) + 1
    about = {"url": store.url, "private": True, "number": number, "claim": new_claim(number)}
    store.put(f"claims/{about['claim']}", json.dumps({"run": folder.name}).encode())
    try:
        rivals = [claim for claim in store.names("claims") if number_of(claim) >= number]
        if rivals != [about["claim"]]:
            raise UserError(f"{store.url}: is being restored by somebody else at this moment")
        _, manifest = newest(store)  # only after the claim: the old owner's permits end here
        with _aside(folder) as aside:
            _download(store, manifest, aside)
            charged = _charge(aside, manifest)
            write_json(aside.archive, about)
    except BaseException:
        store.delete(f"claims/{about['claim']}")  # nothing came of it: the old owner may go on
        raise
    return folder, charged


def read_copy(url: str, runs: Path) -> RunFolder:
    """A copy of a finished run, to certify and report on; its archive is left alone.

    A copy made before is opened again. Raises as `restore`, and UserError for an unfinished run.
    """
    store = ObjectStore(url)
    _, manifest = _whole(store)
    if not manifest["trained"]:
        raise UserError(
            f"{store.url}: this run has not finished training; if its folder is lost, `dpdist "
            f"cluster restore {store.url}` brings it back to be continued"
        )
    folder = RunFolder(runs / manifest["run"])
    source = folder.private / "copy-of.json"
    if source.exists() and read_json(source, {"url": str})["url"] == store.url:
        return open_run(folder.name, runs)
    _free(folder)
    with _aside(folder) as aside:
        _download(store, manifest, aside)
        read_released(aside)
        write_json(aside.private / source.name, {"url": store.url})
    return folder


def fetch(url: str, into: Path) -> tuple[Path, list[str]]:
    """Copy what may be published of an archived run into a folder of its name under `into`."""
    store = ObjectStore(url)
    _, manifest = newest(store)
    target = into / manifest["run"]
    paths = sorted(path for path in manifest["files"] if is_publishable(path))
    try:
        with moved_in(target) as aside:
            for path in paths:
                _download_file(store, path, manifest["files"][path], aside / path)
    except ValueError as error:
        raise UserError(str(error)) from None
    return target, paths


def _whole(store: ObjectStore) -> tuple[int, dict[str, Any]]:
    """As `newest`. Raises UserError for an archive without private state."""
    number, manifest = newest(store)
    if not manifest["private"]:
        raise UserError(
            f"{store.url}: holds no private state (archive_private was not given), only what may "
            f"be published; `dpdist cluster fetch {store.url}` copies that, the report included"
        )
    return number, manifest


def _free(folder: RunFolder) -> RunFolder:
    if folder.path.exists():
        raise UserError(f"{folder.path}: is there already; choose another --runs or --name")
    return folder


@contextmanager
def _aside(folder: RunFolder) -> Iterator[RunFolder]:
    """A new run folder, built beside its place and moved there when it is whole."""
    with built_aside(folder.path) as path:
        path.mkdir()
        aside = RunFolder(path)
        private_folder(aside.private)
        yield aside


def _download(store: ObjectStore, manifest: dict[str, Any], aside: RunFolder) -> None:
    for path, entry in manifest["files"].items():
        target = aside.path / path
        _download_file(store, path, entry, target)
        if path.startswith("private/"):
            target.chmod(0o600)
    aside.check_format()


def _download_file(store: ObjectStore, path: str, entry: dict[str, Any], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        found = store.download(entry["object"], target, entry["size"])
    except Missing as error:
        raise UserError(
            f"{store.url}: {path} is named by the manifest and missing; if a run was still writing "
            "there, try again"
        ) from error
    if found != (entry["digest"], entry["size"]):
        raise UserError(
            f"{store.url}: {path} is not what was archived ("
            f"{'more' if found[1] > entry['size'] else found[1]} bytes instead of "
            f"{entry['size']}, or changed): the archive is damaged"
        )


def _charge(aside: RunFolder, manifest: dict[str, Any]) -> int:
    """Put on record what the lost folder may have released beyond the archived ledger, and begin
    a new attempt. Raises UserError when the ledger does not hold all that the run was made of."""
    if not begun(aside):
        return 0
    plan = read_released(aside).plan
    if manifest["trained"]:
        return 0
    try:
        with Ledger.open(aside.ledger, plan.fingerprint()) as ledger:
            charged = 0
            permit = permit_of(manifest)
            if permit:
                if permit.steps > plan.steps:
                    raise UserError("its permit speaks of more steps than the plan has")
                known = ledger.steps_of(permit.epoch)
                for step in range(permit.step, permit.steps):
                    if step not in known:
                        ledger.record(step, secrets.token_hex(32))
                        charged += 1
            if ledger.epoch is not None:
                ledger.new_epoch("restored from an archive")
            return charged
    except JournalError as error:
        raise UserError(f"the archived ledger cannot be used: {error}") from error
