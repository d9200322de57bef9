"""Copies of a run folder: an archive in an object store, and an export of its publishable files.

The run folder itself stays on a file system: the ledger is appended and synced there, under a
lock, before noise is added. The archive follows it. Without the private state it holds the
publishable files; with it, a run can be continued from it.

    claims/00000001-TOKEN        who writes here; the highest number owns the prefix
    00000001/manifest.json       written last: every file's object, digest and size; the permit
    00000001/files/TOKEN/PATH    the files, each written whole under a new name

An upload that was torn leaves the manifest before it, which is whole. A new owner claims the next
number and lists the claims: an owner that sees another claim as high as its own gives way. An
owner looks for higher claims after each manifest, and stops when there is one.

**What a lost folder may have released.** Its ledger knew, and the archived copy may be older. So
the training asks for a permit: in attempt e, up to step B. The permit is in a manifest, with the
ledger as it was then, before the first of those steps is released; until then the training waits.
When the folder is lost, every step of e below B that the archived ledger lacks is recorded as
released, which is never too little; and a new attempt begins, whose nonce is fresh, so that no
noise is drawn twice. A folder that was not lost after all cannot continue: its next permit finds
the higher claim.

An export brings a report home through a job's log, as text. Only the release, the certificates and
the report leave a cluster this way; private/ and run.json stay, so that a fetched copy is never
taken for a run that could be continued.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import secrets
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, model_validator

from dpdist.cluster.object_store import ObjectNotFoundError, ObjectStore
from dpdist.core.errors import ClusterError, UserError
from dpdist.core.fields import FileShape, WholeNumber, check_run_name, key_error
from dpdist.core.files import (
    MissingFileError,
    atomic_folder,
    check_relative_path,
    make_private_folder,
    parse_json,
    quoted,
    read_json,
    staging_folder,
    write_json,
)
from dpdist.privacy.ledger import JournalError, Ledger
from dpdist.release.files import REQUIRED_FILES, is_release_file
from dpdist.runs.folder import (
    WRITER,
    RunFolder,
    complete_checkpoints,
    has_released,
    open_run,
    read_verified_ledger,
)

# --- publishable files as text ----------------------------------------------------------------


PUBLISHABLE = (
    "recipe.yaml", "evaluation.json", "release", "certificates", "attacks", "audit", "report",
)  # fmt: skip
MAX_EXPORT_BYTES = 200 * 2**20
_BEGIN, _END = "-----BEGIN DPDIST EXPORT-----", "-----END DPDIST EXPORT "
_LINE = 4096


def is_publishable(path: str) -> bool:
    """Whether a file of this path (as in `dpdist.core.files.check_relative_path`) below a run
    folder may leave; of release/ only what `dpdist release` writes."""
    top, _, below = path.partition("/")
    return top in PUBLISHABLE and (top != "release" or is_release_file(below))


def publishable_files(folder: RunFolder) -> list[Path]:
    """The files that may leave, relative to the run folder, sorted. What a link leads to is left
    out, and so are released weights without their card."""
    found, root = [], folder.path.resolve()
    for name in PUBLISHABLE:
        place = folder.path / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            inside = path.relative_to(folder.path)
            if not is_publishable(inside.as_posix()):
                continue
            if path.is_file() and path.resolve() == root / inside:
                found.append(inside)
    whole = all(Path("release", name) in found for name in REQUIRED_FILES)
    return [path for path in found if whole or path.parts[0] != "release"]


def export_text(folder: RunFolder, limit: int = MAX_EXPORT_BYTES) -> str:
    """The publishable files as printable text, ended by a digest. Raises UserError above `limit`
    bytes, and when there is no such run."""
    folder.check_format()
    files = publishable_files(folder)
    total = sum((folder.path / path).stat().st_size for path in files)
    if total > limit:
        raise UserError(
            f"{folder.path}: {total / 2**20:.0f} MiB are too much for a job's log (limit "
            f"{limit / 2**20:.0f}); copy it from the shared storage"
        )
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as archive:
        for path in files:
            archive.add(folder.path / path, arcname=path.as_posix(), recursive=False)
    text = base64.b64encode(raw.getvalue()).decode()
    lines = [text[at : at + _LINE] for at in range(0, len(text), _LINE)]
    digest = hashlib.blake2b(raw.getvalue(), digest_size=16).hexdigest()
    return "\n".join([_BEGIN, *lines, f"{_END}{digest}-----"])


def unpack_export(log: str, target: Path) -> list[Path]:
    """Write the files found in a job's log under `target`; returns their paths.

    Raises UserError when the text is incomplete, was changed, or names a file that has no business
    in an export; nothing is written then.
    """
    try:
        body, _, tail = log.partition(_BEGIN)[2].partition(_END)
        raw = base64.b64decode("".join(body.split()), validate=True)
    except ValueError as error:
        raise UserError(f"the job's log holds a damaged export: {error}") from error
    digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
    if not tail.startswith(f"{digest}-----"):
        raise UserError("the job's log holds no complete export")
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as archive,
            staging_folder(target) as aside,
        ):
            names = archive.getnames()
            for name in names:
                if not is_publishable(check_relative_path(name)):
                    raise ValueError(f"it names {name!r}, which may not leave a cluster")
            archive.extractall(aside, filter="data")
    except (ValueError, OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise UserError(f"the job's log holds an export that cannot be used: {error}") from error
    return [target / name for name in names]


# --- names, claims, manifest and permit -------------------------------------------------------


FORMAT = 2
MANIFEST = "manifest.json"


class Permit(FileShape):
    """Leave to release, in this attempt epoch, the steps from `step` up to but not `steps`.

    private/permit-asked.json and permit.json hold the one that was asked for and the granted one.

    Attributes:
        epoch: The attempt epoch.
        step: The first step that may be released.
        steps: The step before which releases end.
    """

    model_config = ConfigDict(extra="forbid")

    epoch: WholeNumber
    step: WholeNumber
    steps: WholeNumber

    @model_validator(mode="after")
    def _check_order(self) -> Permit:
        if self.step > self.steps:
            raise key_error("steps", f"must be >= {self.step}, the first step")
        return self


class ArchiveRecord(FileShape):
    """private/archive.json: the archive of a run, and the claim by which the run owns it.

    Attributes:
        url: Address of the archive.
        private: Whether the private state is archived too.
        number: Number of the claim.
        claim: Name of the claim: its number and a random token.
    """

    url: str
    private: bool
    number: int
    claim: str


class StoredFile(FileShape):
    """One file of an archive: its object in the store, and digest and size of its content.

    Attributes:
        object: Name of the object, below the archive's prefix.
        digest: Digest of the content.
        size: Number of bytes.
    """

    object: str
    digest: str
    size: int


class Manifest(FileShape):
    """The manifest of an archive: state of the run, and its files by path in the run folder.

    Attributes:
        format: Format of the manifest.
        dpdist: Version of dpdist that wrote it.
        run: Name of the run.
        private: Whether the private state is archived too.
        trained: Whether the training is finished.
        permit: The granted permit; null where there is none.
        files: The archived files, by path in the run folder.
    """

    newest_format = FORMAT

    format: int
    dpdist: str
    run: Annotated[str, AfterValidator(check_run_name)]
    private: bool
    trained: bool
    permit: Permit | None
    files: dict[str, StoredFile]


def read_permit(path: Path) -> Permit | None:
    """A permit that was asked for or granted; None when there is none."""
    try:
        return Permit.read(path)
    except MissingFileError:
        return None


def newest_manifest(store: ObjectStore) -> tuple[int, Manifest]:
    """Number and content of the newest whole manifest. Raises UserError when there is none."""
    numbers = sorted({claim_number(claim) for claim in store.list_names("claims")}, reverse=True)
    if not numbers:
        raise UserError(f"{store.url}: there is no archive of a run")
    for number in numbers:
        name = f"{claim_folder(number)}/{MANIFEST}"
        try:
            raw = store.get(name)
        except ObjectNotFoundError:
            continue  # its owner never finished an upload, and so never released anything
        manifest = decode_manifest(raw, f"{store.url}: {name}", number)
        return number, manifest
    raise UserError(
        f"{store.url}: no upload was ever finished (no manifest); there is nothing to restore"
    )


def claim_folder(number: int) -> str:
    return f"{number:08d}"


def make_claim(number: int) -> str:
    return f"{claim_folder(number)}-{secrets.token_hex(8)}"


def claim_number(claim: str) -> int:
    """The number of a claim. Raises UserError for an object that is none."""
    number = claim.partition("-")[0]
    if not (number.isascii() and number.isdigit() and len(number) <= 16):
        raise UserError(f"claims/{claim!r} is no claim of an archive; remove it")
    return int(number)


def encode_manifest(body: dict[str, Any]) -> bytes:
    """The manifest as it is stored."""
    return json.dumps(body, sort_keys=True, allow_nan=False).encode()


def decode_manifest(raw: bytes, context: str, number: int) -> Manifest:
    """Inverse of `encode_manifest`: every name in it lies below the run's folder, or the prefix's.

    Raises UserError when it is damaged or of a newer version.
    """
    manifest = Manifest.parse(parse_json(raw, context), context)
    try:
        begin = f"{claim_folder(number)}/files/"
        for path, entry in manifest.files.items():
            check_relative_path(path, "files")
            if not check_relative_path(entry.object, path).startswith(begin):
                raise ValueError(f"{path}: its object must lie in {begin}")
    except ValueError as error:
        raise UserError(f"{context} is damaged: {error}") from error
    return manifest


# --- the owner of an archive ------------------------------------------------------------------


_CHECKPOINT_FILES = ("done.json", "state.safetensors")
_RETRY_SECONDS = 600.0  # how long an archive that cannot be written is tried again
_CHECKPOINTS_FOLDER = "private/checkpoints/"
_LEDGER, _ANCHOR = "private/ledger.jsonl", "private/ledger.anchor"
# Of private/, what a continued run does not need or must make anew.
_NOT_ARCHIVED = {
    "ray", "ray.log", "errors.txt", "failure.json", "progress.json", "archive.json",
    "permit.json", "permit-asked.json", "stop-asked", "interrupted.json", "checkpoints",
    "ledger.jsonl", "ledger.anchor",
}  # fmt: skip


class Archive:
    """The archive of a run folder that owns its prefix; `claim` and `find` open it."""

    def __init__(self, folder: RunFolder, record: dict[str, Any]) -> None:
        self.folder, self.private = folder, record["private"]
        self.store = ObjectStore(record["url"])
        self._number, self._claim = record["number"], record["claim"]
        self._files: dict[str, StoredFile] | None = None  # unknown: another process wrote them
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._checkpoint = ""

    @classmethod
    def find(cls, folder: RunFolder) -> Archive | None:
        """The archive that this run folder owns, None when it has none."""
        return cls(folder, _read_archive_record(folder)) if folder.archive.exists() else None

    @classmethod
    def check_unclaimed(cls, folder: RunFolder, url: str | None) -> None:
        """Raise UserError when a run that is not archived yet may not begin at this address."""
        if url is not None and not folder.archive.exists():
            store = ObjectStore(url)
            if store.list_names("claims"):
                raise UserError(
                    f"{store.url}: holds the archive of a run already. Give each run a prefix of "
                    "its own; if that run's folder is lost, `dpdist cluster fetch --restore "
                    f"{store.url}` brings it back"
                )

    @classmethod
    def claim(cls, folder: RunFolder, url: str | None, private: bool) -> Archive | None:
        """The archive of a run at its start; None when none is asked for.

        Raises UserError when the prefix belongs to another run, when this run is archived elsewhere
        or was taken over, when everybody could read private state; ClusterError when the store
        does not answer.
        """
        bound = folder.archive.exists()
        if not bound:
            if url is None:
                return None
            cls.check_unclaimed(folder, url)
            where = {"url": url.rstrip("/"), "private": private}
            write_json(folder.archive, {**where, "number": 1, "claim": make_claim(1)})
        about = _read_archive_record(folder)
        if url is None or url.rstrip("/") != about["url"] or (about["private"] and not private):
            raise UserError(
                f"{folder.path}: this run is archived at {about['url']}"
                f"{' with its private state' if about['private'] else ''}; keep resources.archive "
                "and archive_private as they were. Only if that archive is deleted for "
                f"good: remove {folder.archive}",
                see="how-to/cluster.md#an-archive-in-an-object-store",
            )
        if private and not about["private"]:
            write_json(folder.archive, {**about, "private": True})
        archive = cls(folder, _read_archive_record(folder))
        try:
            archive._take_ownership()
        except (ClusterError, UserError):
            if not bound:  # nothing was sent: the run is free of it, and of two both give way
                with suppress(ClusterError):
                    archive.store.delete(f"claims/{archive._claim}")
                folder.archive.unlink()
            raise
        return archive

    def _take_ownership(self) -> None:
        """Make the claim, or see that it is still the highest."""
        if not self.store.list_names("claims"):
            self.store.put(f"claims/{self._claim}", json.dumps({"run": self.folder.name}).encode())
        self._check_claim()
        if self.private and self.store.is_public(f"claims/{self._claim}"):
            raise UserError(
                f"{self.store.url}: can be read without credentials; private state holds the run "
                "key, which removes the noise. Close the bucket, or leave archive_private out",
                see="how-to/cluster.md#an-archive-in-an-object-store",
            )

    def _check_claim(self) -> None:
        claims = self.store.list_names("claims")
        if self._claim not in claims or any(
            claim_number(claim) >= self._number for claim in claims if claim != self._claim
        ):
            raise UserError(
                f"{self.store.url}: this prefix was claimed by another run folder: the run was "
                f"restored elsewhere, or two runs were given one prefix. {self.folder.path} may "
                "not go on; continue the other one, or begin a new run with its own prefix",
                see="how-to/cluster.md#an-archive-in-an-object-store",
            )

    @property
    def notice(self) -> str:
        """Return the text that the user reads before anything is sent."""
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
        permit = read_permit(self.folder.permit_request) if self.private else None
        first = self._files is None
        before = self._stored_files() if self._files is None else self._files
        # The checkpoint is chosen before the ledger is read: the ledger then covers it.
        chosen = self._paths_to_archive()
        files, stamps = self._upload_changes(chosen, before)
        checkpoint = _complete_checkpoint(files, chosen)
        if not checkpoint:  # superseded while it was sent: the one before is covered as well
            checkpoint = _complete_checkpoint(before)
            files |= {
                path: entry
                for path, entry in before.items()
                if path.startswith(_CHECKPOINTS_FOLDER)
            }
        body = {
            "format": FORMAT,
            **WRITER,
            "run": self.folder.name,
            "private": self.private,
            "trained": "private/trained.json" in files,
            "checkpoint": checkpoint,
            "permit": permit and permit.model_dump(),
            "files": {path: entry.model_dump() for path, entry in files.items()},
        }
        self.store.put(f"{claim_folder(self._number)}/{MANIFEST}", encode_manifest(body))
        self._files, self._stamps, self._checkpoint = files, stamps, checkpoint
        # Only now: a new owner that the look misses has not read a manifest yet, and reads this.
        self._check_claim()
        kept = {entry.object for entry in files.values()}
        for entry in before.values():
            if entry.object not in kept:
                self.store.delete(entry.object)
        if first:  # what earlier owners left is not read again
            for number in range(1, self._number):
                self.store.delete_folder(claim_folder(number))
        return permit

    def _upload_changes(
        self, paths: list[str], previous: dict[str, StoredFile]
    ) -> tuple[dict[str, StoredFile], dict[str, tuple[int, int, int]]]:
        """Put what changed; (entries, stamps) of the ledger and the chosen files by path."""
        files: dict[str, StoredFile] = {}
        stamps: dict[str, tuple[int, int, int]] = {}
        if self.private and self.folder.ledger.exists():
            # The anchor first: the lines that are written meanwhile lie beyond it.
            if self.folder.anchor.exists():
                files[_ANCHOR] = self._upload(_ANCHOR, self.folder.anchor.read_bytes())
            raw = self.folder.ledger.read_bytes()
            files[_LEDGER] = self._upload(_LEDGER, raw[: raw.rfind(b"\n") + 1])
        for path in paths:
            try:
                status = (self.folder.path / path).stat()
                stamps[path] = (status.st_size, status.st_mtime_ns, status.st_ino)
                unchanged = path in previous and stamps[path] == self._stamps.get(path)
                files[path] = (
                    previous[path] if unchanged else self._upload(path, self.folder.path / path)
                )
            except (FileNotFoundError, ObjectNotFoundError):
                continue  # replaced meanwhile; the next update finds what is there then
        return files, stamps

    def _stored_files(self) -> dict[str, StoredFile]:
        """The files of the manifest that an earlier process of this owner wrote, if any."""
        name = f"{claim_folder(self._number)}/{MANIFEST}"
        try:
            raw = self.store.get(name)
        except ObjectNotFoundError:
            return {}
        return decode_manifest(raw, f"{self.store.url}: {name}", self._number).files

    def _paths_to_archive(self) -> list[str]:
        """Paths of the files to keep, relative to the run folder, the ledger left out."""
        found = [path.as_posix() for path in publishable_files(self.folder)]
        if not self.private:
            return found
        root, growing = self.folder.path, (self.folder.metrics, self.folder.worker_groups)
        # What is not kept is not looked into either: checkpoints come and go meanwhile.
        kept = [top for top in self.folder.private.iterdir() if top.name not in _NOT_ARCHIVED]
        private = sorted(
            path
            for top in kept
            if not top.is_symlink()  # a link to a folder leads out of the run as well
            for path in (top.rglob("*") if top.is_dir() else [top])
            if path.is_file()
            and not path.is_symlink()
            and not path.name.startswith(".")
            and (path not in growing or self.folder.training_summary.exists())
        )
        newest = complete_checkpoints(self.folder.checkpoints)[-1:]
        private += [file for step in newest for file in sorted(step.iterdir())]
        return [*found, "run.json", *(path.relative_to(root).as_posix() for path in private)]

    def _upload(self, path: str, source: bytes | Path) -> StoredFile:
        name = f"{claim_folder(self._number)}/files/{secrets.token_hex(8)}/{path}"
        digest, size = self.store.put(name, source)
        return StoredFile(object=name, digest=digest, size=size)

    # --- beside a training

    def make_updater(self, log: Callable[[str], None]) -> Callable[[], None]:
        """A function to call now and then while the run trains: it grants permits and copies new
        checkpoints. A store that fails is tried again for ten minutes, then ClusterError."""
        failing_since = None
        next_try = 0.0

        def poll() -> None:
            nonlocal failing_since, next_try
            asked = read_permit(self.folder.permit_request) if self.private else None
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
                    log(f"archive: {error}; trying again")
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
                write_json(self.folder.permit, permit.model_dump())

        return poll


def _complete_checkpoint(files: dict[str, Any], expected_paths: Sequence[str] = ()) -> str:
    """The name of the checkpoint among these files; one that lacks a file, of all or of those that
    were chosen, is taken out of them."""
    parts = {path for path in files if path.startswith(_CHECKPOINTS_FOLDER)}
    for name in {path.split("/")[2] for path in parts}:
        wanted = {f"{_CHECKPOINTS_FOLDER}{name}/{file}" for file in _CHECKPOINT_FILES}
        wanted |= {
            path for path in expected_paths if path.startswith(f"{_CHECKPOINTS_FOLDER}{name}/")
        }
        if wanted <= parts:
            return name
    for path in parts:
        del files[path]
    return ""


def _read_archive_record(folder: RunFolder) -> dict[str, Any]:
    """Where a run is archived, and its claim. Raises UserError."""
    about = ArchiveRecord.read_keys(folder.archive)
    if claim_number(about["claim"]) != about["number"]:
        raise UserError(f"{folder.archive}: damaged: {quoted(about['claim'])} is not its claim")
    return about


# --- restoring and fetching -------------------------------------------------------------------


def is_archive_url(run: str) -> bool:
    """Whether a run is named by the address of its archive."""
    return "://" in run


def open_run_or_archive(run: str, runs: Path) -> RunFolder:
    """The run folder by path or name, or a copy under `runs` of a finished run's archive.

    Raises UserError when there is none, ClusterError when the store does not answer.
    """
    return open_archived_copy(run, runs) if is_archive_url(run) else open_run(run, runs)


def restore(url: str, runs: Path) -> tuple[RunFolder, int]:
    """Bring a lost run folder back and take its archive over; the folder and how many steps were
    charged that the lost one may have released.

    Raises UserError for an archive that is incomplete, damaged, or without private state;
    ClusterError when the store does not answer. The folder is whole or not there.
    """
    store = ObjectStore(url)
    number, manifest = _newest_private_manifest(store)
    try:
        folder = _check_absent(RunFolder(runs / check_run_name(manifest.run)))
    except ValueError as error:
        raise UserError(f"{url}: {error}, got {manifest.run!r}") from None
    number = max(number, *(claim_number(claim) for claim in store.list_names("claims"))) + 1
    about = {"url": store.url, "private": True, "number": number, "claim": make_claim(number)}
    store.put(f"claims/{about['claim']}", json.dumps({"run": folder.name}).encode())
    try:
        rivals = [claim for claim in store.list_names("claims") if claim_number(claim) >= number]
        if rivals != [about["claim"]]:
            raise UserError(f"{store.url}: is being restored by somebody else at this moment")
        # only after the claim: the old owner's permits end here
        _, manifest = newest_manifest(store)
        with _build_run_folder(folder) as aside:
            _download(store, manifest, aside)
            charged = _charge_possible_releases(aside, manifest)
            write_json(aside.archive, about)
    except BaseException:
        store.delete(f"claims/{about['claim']}")  # nothing came of it: the old owner may go on
        raise
    return folder, charged


def open_archived_copy(url: str, runs: Path) -> RunFolder:
    """A copy of a finished run, to certify and report on; its archive is left alone.

    A copy made before is opened again. Raises as `restore`, and UserError for an unfinished run.
    """
    store = ObjectStore(url)
    _, manifest = _newest_private_manifest(store)
    if not manifest.trained:
        raise UserError(
            f"{store.url}: this run has not finished training; if its folder is lost, `dpdist "
            f"cluster fetch --restore {store.url}` brings it back to be continued"
        )
    folder = RunFolder(runs / manifest.run)
    source = folder.private / "copy-of.json"
    if source.exists() and read_json(source, {"url": str})["url"] == store.url:
        return open_run(folder.name, runs)
    _check_absent(folder)
    with _build_run_folder(folder) as aside:
        _download(store, manifest, aside)
        read_verified_ledger(aside)
        write_json(aside.private / source.name, {"url": store.url})
    return folder


def fetch_publishable_files(url: str, into: Path) -> tuple[Path, list[str]]:
    """Copy what may be published of an archived run into a folder of its name under `into`."""
    store = ObjectStore(url)
    _, manifest = newest_manifest(store)
    target = into / manifest.run
    paths = sorted(path for path in manifest.files if is_publishable(path))
    try:
        with staging_folder(target) as aside:
            for path in paths:
                _download_file(store, path, manifest.files[path], aside / path)
    except ValueError as error:
        raise UserError(str(error)) from None
    return target, paths


def _newest_private_manifest(store: ObjectStore) -> tuple[int, Manifest]:
    """Return `newest_manifest`. Raises UserError for an archive without private state."""
    number, manifest = newest_manifest(store)
    if not manifest.private:
        raise UserError(
            f"{store.url}: holds no private state (archive_private was not given), only what may "
            f"be published; `dpdist cluster fetch {store.url}` copies that, the report included"
        )
    return number, manifest


def _check_absent(folder: RunFolder) -> RunFolder:
    if folder.path.exists():
        raise UserError(f"{folder.path}: is there already; choose another folder")
    return folder


@contextmanager
def _build_run_folder(folder: RunFolder) -> Iterator[RunFolder]:
    """A new run folder, built beside its place and moved there when it is whole."""
    with atomic_folder(folder.path) as path:
        path.mkdir()
        aside = RunFolder(path)
        make_private_folder(aside.private)
        yield aside


def _download(store: ObjectStore, manifest: Manifest, folder: RunFolder) -> None:
    for path, entry in manifest.files.items():
        target = folder.path / path
        _download_file(store, path, entry, target)
        if path.startswith("private/"):
            target.chmod(0o600)
    folder.check_format()


def _download_file(store: ObjectStore, path: str, entry: StoredFile, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        found = store.download(entry.object, target, entry.size)
    except ObjectNotFoundError as error:
        raise UserError(
            f"{store.url}: {path} is named by the manifest and missing; if a run was still writing "
            "there, try again"
        ) from error
    if found != (entry.digest, entry.size):
        raise UserError(
            f"{store.url}: {path} is not what was archived ("
            f"{'more' if found[1] > entry.size else found[1]} bytes instead of "
            f"{entry.size}, or changed): the archive is damaged"
        )


def _charge_possible_releases(folder: RunFolder, manifest: Manifest) -> int:
    """Put on record what the lost folder may have released beyond the archived ledger, and begin
    a new attempt. Raises UserError when the ledger does not hold all that the run was made of."""
    if not has_released(folder):
        return 0
    plan = read_verified_ledger(folder).plan
    if manifest.trained:
        return 0
    try:
        with Ledger.open(folder.ledger, plan.fingerprint()) as ledger:
            charged = 0
            permit = manifest.permit
            if permit:
                if permit.steps > plan.steps:
                    raise UserError("its permit speaks of more steps than the plan has")
                known = ledger.released_steps(permit.epoch)
                for step in range(permit.step, permit.steps):
                    if step not in known:
                        ledger.record(step, secrets.token_hex(32))
                        charged += 1
            if ledger.epoch is not None:
                ledger.new_epoch("restored from an archive")
            return charged
    except JournalError as error:
        raise UserError(f"the archived ledger cannot be used: {error}") from error
