"""A copy of a run folder in an object store, from which a lost folder is brought back.

The run folder itself stays on a file system: the ledger is appended and synced there, under a
lock, before noise is added. The archive follows it. Without the private state it holds what may
be published; with it, a run can be continued from it.

    claims/00000001-TOKEN        who writes here; the highest number owns the prefix
    00000001/manifest.json       written last: every file's object, digest and size; the permit
    00000001/files/TOKEN/PATH    the files, each written whole under a new name

An upload that was torn leaves the manifest before it, which is whole. A new owner claims the next
number and lists the claims: whoever sees another claim as high as its own gives way. An owner looks
for higher claims after each manifest, and stops when there is one.

**What a lost folder may have released.** Its ledger knew, and the archived copy may be older. So
the training asks for a permit: in attempt e, up to step B. The permit is in a manifest, with the
ledger as it was then, before the first of those steps is released; until then the training waits.
When the folder is lost, every step of e below B that the archived ledger lacks is recorded as
released, which is never too little; and a new attempt begins, whose nonce is fresh, so that no
noise is drawn twice. A folder that was not lost after all cannot go on: its next permit finds the
higher claim.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from cluster.errors import ClusterError
from cluster.objectstore import Missing, ObjectStore
from cluster.storage import built_aside, private_folder, write_json
from dpdist import __version__
from dpdist.errors import UserError
from dpdist.exporting import publishable
from dpdist.privacy.journal import JournalError
from dpdist.privacy.ledger import Ledger
from dpdist.runfolder import RunFolder, open_run, read_json

FORMAT = 1
_MANIFEST = "manifest.json"
_CHECKPOINT = ("done.json", "state.safetensors")
_RETRY_SECONDS = 600.0  # how long an archive that cannot be written is tried again
_STEPS = "private/checkpoints/"
_LEDGER = "private/ledger.jsonl"
# Of private/, what a continued run does not need or must make anew.
_NOT_KEPT = {
    "ray", "ray.log", "errors.txt", "failure.json", "progress.json", "archive.json",
    "permit.json", "permit-asked.json", "checkpoints", "ledger.jsonl",
}  # fmt: skip


@dataclass(frozen=True)
class Permit:
    """Leave to release, in this attempt epoch, the steps from `step` up to but not `steps`."""

    epoch: int
    step: int
    steps: int


class Archive:
    """The archive of a run folder that owns its prefix; `begin` and `of` open it."""

    def __init__(self, folder: RunFolder, about: dict[str, Any]) -> None:
        self.folder, self.private = folder, bool(about["private"])
        self.store = ObjectStore(about["url"])
        self._number, self._claim = int(about["number"]), str(about["claim"])
        self._files: dict[str, dict[str, Any]] | None = None  # unknown: another process wrote them
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._checkpoint = ""

    @classmethod
    def of(cls, folder: RunFolder) -> Archive | None:
        """The archive that this run folder owns, None when it has none."""
        return cls(folder, read_json(folder.archive)) if folder.archive.exists() else None

    @classmethod
    def check_free(cls, folder: RunFolder, url: str | None) -> None:
        """Raise UserError when a run that is not archived yet may not begin at this address."""
        if url is not None and not folder.archive.exists():
            store = ObjectStore(url)
            if store.names("claims"):
                raise UserError(_taken(store))

    @classmethod
    def begin(cls, folder: RunFolder, url: str | None, private: bool) -> Archive | None:
        """The archive of a run at its start; None when none is asked for.

        Raises UserError when the prefix belongs to another run, when this run is archived elsewhere
        or was taken over, when everybody could read private state; ClusterError when the store
        does not answer.
        """
        if not folder.archive.exists():
            if url is None:
                return None
            cls.check_free(folder, url)
            where = {"url": url.rstrip("/"), "private": private}
            write_json(folder.archive, {**where, "number": 1, "claim": _new_claim(1)})
        about = read_json(folder.archive)
        if url is None or url.rstrip("/") != about["url"] or (about["private"] and not private):
            raise UserError(
                f"{folder.path}: this run is archived at {about['url']}"
                f"{' with its private state' if about['private'] else ''}; keep resources.archive "
                "(--archive) and archive_private as they were. Only if that archive is deleted for "
                f"good: remove {folder.archive}"
            )
        if private and not about["private"]:
            write_json(folder.archive, {**about, "private": True})
        archive = cls(folder, read_json(folder.archive))
        archive._own()
        return archive

    def _own(self) -> None:
        """Make the claim, or see that it is still the highest."""
        claims = self.store.names("claims")
        if not claims:
            self.store.put(f"claims/{self._claim}", json.dumps({"run": self.folder.name}).encode())
        try:
            self._check_claim()
            if self.private and self.store.readable_by_all(f"claims/{self._claim}"):
                raise UserError(
                    f"{self.store.url}: can be read without credentials; private state holds the "
                    "run key, which removes the noise. Close the bucket, or leave archive_private "
                    "out"
                )
        except UserError:
            if not claims:  # nothing was sent yet; of two that began at once, both give way
                self.store.delete(f"claims/{self._claim}")
                self.folder.archive.unlink()
            raise

    def _check_claim(self) -> None:
        claims = self.store.names("claims")
        if self._claim not in claims or any(
            _number(claim) >= self._number for claim in claims if claim != self._claim
        ):
            raise UserError(
                f"{self.store.url}: this prefix was claimed by another run folder: the run was "
                f"restored elsewhere, or two runs were given one prefix. {self.folder.path} may "
                "not go on; continue the other one, or begin a new run with its own prefix"
            )

    @property
    def notice(self) -> str:
        """What the user is told before anything is sent."""
        if not self.private:
            return f"archive: {self.store.url} receives what may be published, no private state"
        return (
            f"archive: {self.store.url} receives the PRIVATE state too: run key, ledger, "
            "checkpoints. Who can read it can remove the noise: it must be as closed as the run "
            "folder"
        )

    # --- writing

    def update(self) -> Permit | None:
        """Bring the archive up to date; returns the permit that it holds now.

        Raises UserError when another folder has claimed the prefix, ClusterError when the store
        cannot be written: the archive is then as it was before.
        """
        permit = read_permit(self.folder.permit_asked) if self.private else None
        first = self._files is None
        before = self._stored() if self._files is None else self._files
        files: dict[str, dict[str, Any]] = {}
        stamps: dict[str, tuple[int, int, int]] = {}
        # The checkpoint is chosen before the ledger is read: the ledger then covers it.
        chosen = self._chosen()
        if self.private and self.folder.ledger.exists():
            raw = self.folder.ledger.read_bytes()
            files[_LEDGER] = self._put(_LEDGER, raw[: raw.rfind(b"\n") + 1])
        for path in chosen:
            try:
                status = (self.folder.path / path).stat()
                stamps[path] = (status.st_size, status.st_mtime_ns, status.st_ino)
                unchanged = path in before and stamps[path] == self._stamps.get(path)
                files[path] = (
                    before[path] if unchanged else self._put(path, self.folder.path / path)
                )
            except (FileNotFoundError, Missing):
                continue  # replaced meanwhile; the next update finds what is there then
        checkpoint = _whole_checkpoint(files)
        if not checkpoint:  # superseded while it was sent: the one before is covered as well
            checkpoint = _whole_checkpoint(before)
            files |= {path: entry for path, entry in before.items() if path.startswith(_STEPS)}
        body = {
            "format": FORMAT,
            "dpdist": __version__,
            "run": self.folder.name,
            "private": self.private,
            "trained": "private/trained.json" in files,
            "checkpoint": checkpoint,
            "permit": None if permit is None else asdict(permit),
            "files": files,
        }
        raw = json.dumps({**body, "check": _digest_of(body)}, sort_keys=True).encode()
        self.store.put(f"{_folder(self._number)}/{_MANIFEST}", raw)
        self._files, self._stamps, self._checkpoint = files, stamps, checkpoint
        # Only now: a new owner that the look misses has not read a manifest yet, and reads this.
        self._check_claim()
        kept = {entry["object"] for entry in files.values()}
        for entry in before.values():
            if entry["object"] not in kept:
                self.store.delete(entry["object"])
        if first:  # what earlier owners left is not read again
            for number in range(1, self._number):
                self.store.delete_folder(_folder(number))
        return permit

    def _stored(self) -> dict[str, dict[str, Any]]:
        """The files of the manifest that an earlier process of this owner wrote, if any."""
        try:
            return json.loads(self.store.get(f"{_folder(self._number)}/{_MANIFEST}"))["files"]
        except Missing:
            return {}

    def _chosen(self) -> list[str]:
        """Paths of the files to keep, relative to the run folder, the ledger left out."""
        found = [path.as_posix() for path in publishable(self.folder)]
        if not self.private:
            return found
        root = self.folder.path
        private = sorted(
            path
            for path in self.folder.private.rglob("*")
            if path.is_file()
            and not path.is_symlink()
            and not path.name.startswith(".")
            and path.relative_to(self.folder.private).parts[0] not in _NOT_KEPT
            and (path != self.folder.metrics or self.folder.trained.exists())  # grows all the time
        )
        newest = _complete(self.folder.checkpoints)[-1:]
        private += [file for step in newest for file in sorted(step.iterdir())]
        return [*found, "run.json", *(path.relative_to(root).as_posix() for path in private)]

    def _put(self, path: str, source: bytes | Path) -> dict[str, Any]:
        name = f"{_folder(self._number)}/files/{secrets.token_hex(8)}/{path}"
        digest, size = self.store.put(name, source)
        return {"object": name, "digest": digest, "size": size}

    # --- beside a training

    def follow(self, say: Callable[[str], None]) -> Callable[[], None]:
        """A function to call now and then while the run trains: it grants permits and copies new
        checkpoints. A store that fails is tried again for ten minutes, then ClusterError."""
        failing_since = None
        next_try = 0.0

        def look() -> None:
            nonlocal failing_since, next_try
            asked = read_permit(self.folder.permit_asked) if self.private else None
            granted = read_permit(self.folder.permit)
            newest = [step.name for step in _complete(self.folder.checkpoints)[-1:]]
            fresh = self.private and newest != [self._checkpoint] and bool(newest)
            wanted = asked is not None and asked != granted
            if not (fresh or wanted) or time.monotonic() < next_try:
                return
            try:
                permit = self.update()
            except ClusterError as error:
                now = time.monotonic()
                if failing_since is None:
                    say(f"archive: {error}; trying again")
                failing_since = failing_since or now
                if now - failing_since > _RETRY_SECONDS:
                    raise ClusterError(
                        f"{error}; the training stopped, since nothing may be released that the "
                        "archive does not know of. The same command continues it"
                    ) from error
                next_try = now + 5.0
                return
            failing_since = None
            if permit is not None:
                write_json(self.folder.permit, asdict(permit))

        return look


def read_permit(path: Path) -> Permit | None:
    """A permit that was asked for or granted; None when there is none."""
    try:
        return Permit(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None


# --- reading


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
    number, manifest = _newest(store)
    if not manifest["private"]:
        raise UserError(
            f"{store.url}: holds no private state (archive_private was not given), so nothing can "
            f"be continued; `dpdist cluster fetch {store.url}` copies what may be published"
        )
    folder = _free(RunFolder(runs / (name or manifest["run"])))
    number = max(number, *(_number(claim) for claim in store.names("claims"))) + 1
    about = {"url": store.url, "private": True, "number": number, "claim": _new_claim(number)}
    store.put(f"claims/{about['claim']}", json.dumps({"run": folder.name}).encode())
    try:
        rivals = [claim for claim in store.names("claims") if _number(claim) >= number]
        if rivals != [about["claim"]]:
            raise UserError(f"{store.url}: is being restored by somebody else at this moment")
        _, manifest = _newest(store)  # only after the claim: the old owner's permits end here
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
    _, manifest = _newest(store)
    if not manifest["private"]:
        raise UserError(
            f"{store.url}: holds only what may be published (archive_private was not given); "
            f"`dpdist cluster fetch {store.url}` copies it, the report included"
        )
    if not manifest["trained"]:
        raise UserError(
            f"{store.url}: this run has not finished training; if its folder is lost, `dpdist "
            f"cluster restore {store.url}` brings it back to be continued"
        )
    folder = RunFolder(runs / manifest["run"])
    source = folder.private / "copy-of.json"
    if source.exists() and read_json(source).get("url") == store.url:
        return open_run(folder.name, runs)
    _free(folder)
    with _aside(folder) as aside:
        _download(store, manifest, aside)
        write_json(aside.private / source.name, {"url": store.url})
    return folder


def fetch(url: str, into: Path) -> tuple[Path, list[str]]:
    """Copy what may be published of an archived run into a folder of its name under `into`."""
    store = ObjectStore(url)
    _, manifest = _newest(store)
    target = into / manifest["run"]
    paths = sorted(path for path in manifest["files"] if _is_publishable(path))
    for path in paths:
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{place.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        _download_file(store, path, manifest["files"][path], partial)
        os.replace(partial, place)
    return target, paths


def _is_publishable(path: str) -> bool:
    return path.split("/")[0] not in ("private", "run.json")


def _newest(store: ObjectStore) -> tuple[int, dict[str, Any]]:
    """Number and content of the newest whole manifest. Raises UserError when there is none."""
    numbers = sorted({_number(claim) for claim in store.names("claims")}, reverse=True)
    if not numbers:
        raise UserError(f"{store.url}: there is no archive of a run")
    for number in numbers:
        name = f"{_folder(number)}/{_MANIFEST}"
        try:
            raw = store.get(name)
        except Missing:
            continue  # its owner never finished an upload, and so never released anything
        try:
            manifest = json.loads(raw)
            if manifest["format"] > FORMAT:
                raise UserError(f"{store.url}: written by a newer dpdist ({manifest['dpdist']})")
            if manifest.pop("check") != _digest_of(manifest):
                raise ValueError("its check does not fit its content")
            for path in manifest["files"]:
                pure = PurePosixPath(path)
                if pure.is_absolute() or ".." in pure.parts:
                    raise ValueError(f"it names {path!r}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{store.url}: {name} is damaged: {error}") from error
        return number, manifest
    raise UserError(
        f"{store.url}: no upload was ever finished (no manifest); there is nothing to restore"
    )


def _free(folder: RunFolder) -> RunFolder:
    if folder.path.exists():
        raise UserError(f"{folder.path}: is there already; choose another --runs or --name")
    return folder


@contextmanager
def _aside(folder: RunFolder) -> Iterator[RunFolder]:
    """A new run folder, built beside its place and moved there when it is whole."""
    with built_aside(folder.path) as path:
        path.mkdir(parents=True)
        aside = RunFolder(path)
        private_folder(aside.private)
        yield aside


def _download(store: ObjectStore, manifest: dict[str, Any], aside: RunFolder) -> None:
    for path, entry in manifest["files"].items():
        target = aside.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        _download_file(store, path, entry, target)
        if path.startswith("private/"):
            target.chmod(0o600)
    aside.check_format()


def _download_file(store: ObjectStore, path: str, entry: dict[str, Any], target: Path) -> None:
    try:
        found = store.download(entry["object"], target)
    except Missing as error:
        raise UserError(
            f"{store.url}: {path} is named by the manifest and missing; if a run was still writing "
            "there, try again"
        ) from error
    if found != (entry["digest"], entry["size"]):
        raise UserError(
            f"{store.url}: {path} is not what was archived ({found[1]} bytes instead of "
            f"{entry['size']}, or changed): the archive is damaged"
        )


def _charge(aside: RunFolder, manifest: dict[str, Any]) -> int:
    """Put on record what the lost folder may have released beyond the archived ledger, and begin
    a new attempt. Raises UserError when the ledger does not cover the checkpoint."""
    if manifest["trained"] or not aside.ledger.exists():
        return 0
    try:
        plan = Ledger.read(aside.ledger).plan_fingerprint
        with Ledger.open(aside.ledger, plan) as ledger:
            steps = [int(step.name.partition("-")[2]) for step in _complete(aside.checkpoints)]
            if not ledger.releases.keys() >= set(range(max(steps, default=0))):
                raise UserError(
                    f"{aside.ledger.name} lacks releases that the archived checkpoint was made of: "
                    "epsilon cannot be stated"
                )
            charged = 0
            permit = manifest["permit"] and Permit(**manifest["permit"])
            if permit:
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


# --- names


def _folder(number: int) -> str:
    return f"{number:08d}"


def _new_claim(number: int) -> str:
    return f"{_folder(number)}-{secrets.token_hex(8)}"


def _number(claim: str) -> int:
    return int(claim.partition("-")[0])


def _digest_of(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _complete(checkpoints: Path) -> list[Path]:
    return sorted(path for path in checkpoints.glob("step-*") if (path / "done.json").exists())


def _whole_checkpoint(files: dict[str, Any]) -> str:
    """The name of the checkpoint among these files; one that lacks a file is taken out of them."""
    parts = {path for path in files if path.startswith(_STEPS)}
    for name in {path.split("/")[2] for path in parts}:
        wanted = {f"{_STEPS}{name}/{file}" for file in _CHECKPOINT}
        if wanted <= parts:
            return name
    for path in parts:
        del files[path]
    return ""


def _taken(store: ObjectStore) -> str:
    return (
        f"{store.url}: holds the archive of a run already. Give each run a prefix of its own; if "
        f"that run's folder is lost, `dpdist cluster restore {store.url}` brings it back"
    )
