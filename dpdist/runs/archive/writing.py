"""The archive's owner: it claims a prefix and follows the run folder while it is written."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dpdist import __version__
from dpdist.base.errors import ClusterError, UserError
from dpdist.base.reading import read_json, shown
from dpdist.base.storage import write_json
from dpdist.cluster.objectstore import Missing, ObjectStore
from dpdist.runs.archive.layout import (
    FORMAT,
    MANIFEST,
    Permit,
    archive_key,
    folder_of,
    new_claim,
    number_of,
    read_manifest,
    read_permit,
    write_manifest,
)
from dpdist.runs.exporting import publishable
from dpdist.runs.folder import RunFolder, complete_checkpoints

_CHECKPOINT = ("done.json", "state.safetensors")
_RETRY_SECONDS = 600.0  # how long an archive that cannot be written is tried again
_STEPS = "private/checkpoints/"
_LEDGER, _ANCHOR = "private/ledger.jsonl", "private/ledger.anchor"
# Of private/, what a continued run does not need or must make anew.
_NOT_KEPT = {
    "ray", "ray.log", "errors.txt", "failure.json", "progress.json", "archive.json",
    "permit.json", "permit-asked.json", "checkpoints", "ledger.jsonl",
    "ledger.anchor",
}  # fmt: skip


class Archive:
    """The archive of a run folder that owns its prefix; `begin` and `of` open it."""

    def __init__(self, folder: RunFolder, about: dict[str, Any]) -> None:
        self.folder, self.private = folder, about["private"]
        self.store = ObjectStore(about["url"])
        self._number, self._claim = about["number"], about["claim"]
        self._files: dict[str, dict[str, Any]] | None = None  # unknown: another process wrote them
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._checkpoint = ""

    @classmethod
    def of(cls, folder: RunFolder) -> Archive | None:
        """The archive that this run folder owns, None when it has none."""
        return cls(folder, _about(folder)) if folder.archive.exists() else None

    @classmethod
    def check_free(cls, folder: RunFolder, url: str | None) -> None:
        """Raise UserError when a run that is not archived yet may not begin at this address, and
        for a key of archives that no manifest could be written with."""
        if url is not None:
            archive_key()
        if url is not None and not folder.archive.exists():
            store = ObjectStore(url)
            if store.names("claims"):
                raise UserError(_taken(store))

    @classmethod
    def check_writable(cls, folder: RunFolder, url: str | None) -> None:
        """Check that a run that is not archived yet could be archived at this address.

        Raises:
            ClusterError: nothing can be written there: a mistyped address, or missing rights.
        """
        if url is not None and not folder.archive.exists():
            store, probe = ObjectStore(url), f"probe-{secrets.token_hex(8)}"
            try:
                store.put(probe, b"")
                store.delete(probe)
            except ClusterError as error:
                raise ClusterError(
                    f"resources.archive (--archive): nothing can be written there: {error}"
                ) from error

    @classmethod
    def check_key(cls, folder: RunFolder) -> None:
        """Raise UserError, before any work, for a key that no archive of this run is written
        with."""
        if folder.archive.exists():
            archive_key()

    @classmethod
    def begin(cls, folder: RunFolder, url: str | None, private: bool) -> Archive | None:
        """The archive of a run at its start; None when none is asked for.

        Raises UserError when the prefix belongs to another run, when this run is archived elsewhere
        or was taken over, when everybody could read private state; ClusterError when the store
        does not answer.
        """
        bound = folder.archive.exists()
        if not bound:
            if url is None:
                return None
            cls.check_free(folder, url)
            where = {"url": url.rstrip("/"), "private": private}
            write_json(folder.archive, {**where, "number": 1, "claim": new_claim(1)})
        about = _about(folder)
        if url is None or url.rstrip("/") != about["url"] or (about["private"] and not private):
            raise UserError(
                f"{folder.path}: this run is archived at {about['url']}"
                f"{' with its private state' if about['private'] else ''}; keep resources.archive "
                "(--archive) and archive_private as they were. Only if that archive is deleted for "
                f"good: remove {folder.archive}"
            )
        if private and not about["private"]:
            write_json(folder.archive, {**about, "private": True})
        archive = cls(folder, _about(folder))
        try:
            archive._own()
        except ClusterError:
            if not bound:  # a mistyped address: nothing was sent, and the run is free of it
                with suppress(ClusterError):
                    archive.store.delete(f"claims/{archive._claim}")
                folder.archive.unlink()
            raise
        return archive

    def _own(self) -> None:
        """Make the claim, or see that it is still the highest."""
        claims = self.store.names("claims")
        if not claims:
            self.store.put(f"claims/{self._claim}", json.dumps({"run": self.folder.name}).encode())
        try:
            self._check_claim()
            if claims:
                self._stored()  # which another key than that of the archive cannot read
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
            number_of(claim) >= self._number for claim in claims if claim != self._claim
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
        # The checkpoint is chosen before the ledger is read: the ledger then covers it.
        chosen = self._chosen()
        files, stamps = self._gather(chosen, before)
        checkpoint = _whole_checkpoint(files, chosen)
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
        self.store.put(f"{folder_of(self._number)}/{MANIFEST}", write_manifest(body))
        self._files, self._stamps, self._checkpoint = files, stamps, checkpoint
        # Only now: a new owner that the look misses has not read a manifest yet, and reads this.
        self._check_claim()
        kept = {entry["object"] for entry in files.values()}
        for entry in before.values():
            if entry["object"] not in kept:
                self.store.delete(entry["object"])
        if first:  # what earlier owners left is not read again
            for number in range(1, self._number):
                self.store.delete_folder(folder_of(number))
        return permit

    def _gather(
        self, chosen: list[str], before: dict[str, dict[str, Any]]
    ) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[int, int, int]]]:
        """Put what changed; (entries, stamps) of the ledger and the chosen files by path."""
        files: dict[str, dict[str, Any]] = {}
        stamps: dict[str, tuple[int, int, int]] = {}
        if self.private and self.folder.ledger.exists():
            # The anchor first: the lines that are written meanwhile lie beyond it.
            if self.folder.anchor.exists():
                files[_ANCHOR] = self._put(_ANCHOR, self.folder.anchor.read_bytes())
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
        return files, stamps

    def _stored(self) -> dict[str, dict[str, Any]]:
        """The files of the manifest that an earlier process of this owner wrote, if any."""
        name = f"{folder_of(self._number)}/{MANIFEST}"
        try:
            raw = self.store.get(name)
        except Missing:
            return {}
        return read_manifest(raw, f"{self.store.url}: {name}", self._number)["files"]

    def _chosen(self) -> list[str]:
        """Paths of the files to keep, relative to the run folder, the ledger left out."""
        found = [path.as_posix() for path in publishable(self.folder)]
        if not self.private:
            return found
        root, growing = self.folder.path, (self.folder.metrics, self.folder.groups)
        # What is not kept is not looked into either: checkpoints come and go meanwhile.
        kept = [top for top in self.folder.private.iterdir() if top.name not in _NOT_KEPT]
        private = sorted(
            path
            for top in kept
            if not top.is_symlink()  # a link to a folder leads out of the run as well
            for path in (top.rglob("*") if top.is_dir() else [top])
            if path.is_file()
            and not path.is_symlink()
            and not path.name.startswith(".")
            and (path not in growing or self.folder.trained.exists())
        )
        newest = complete_checkpoints(self.folder.checkpoints)[-1:]
        private += [file for step in newest for file in sorted(step.iterdir())]
        return [*found, "run.json", *(path.relative_to(root).as_posix() for path in private)]

    def _put(self, path: str, source: bytes | Path) -> dict[str, Any]:
        name = f"{folder_of(self._number)}/files/{secrets.token_hex(8)}/{path}"
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
            newest = [step.name for step in complete_checkpoints(self.folder.checkpoints)[-1:]]
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


def _whole_checkpoint(files: dict[str, Any], chosen: Sequence[str] = ()) -> str:
    """The name of the checkpoint among these files; one that lacks a file, of all or of those that
    were chosen, is taken out of them."""
    parts = {path for path in files if path.startswith(_STEPS)}
    for name in {path.split("/")[2] for path in parts}:
        wanted = {f"{_STEPS}{name}/{file}" for file in _CHECKPOINT}
        wanted |= {path for path in chosen if path.startswith(f"{_STEPS}{name}/")}
        if wanted <= parts:
            return name
    for path in parts:
        del files[path]
    return ""


def _about(folder: RunFolder) -> dict[str, Any]:
    """Where a run is archived, and its claim. Raises UserError."""
    shape = {"url": str, "private": bool, "number": int, "claim": str}
    about = read_json(folder.archive, shape)
    if number_of(about["claim"]) != about["number"]:
        raise UserError(f"{folder.archive}: damaged: {shown(about['claim'])} is not its claim")
    return about


def _taken(store: ObjectStore) -> str:
    return (
        f"{store.url}: holds the archive of a run already. Give each run a prefix of its own; if "
        f"that run's folder is lost, `dpdist cluster restore {store.url}` brings it back"
    )
