"""Copy a run folder: archive it in an object store, or export its publishable files.

The run folder itself stays on a file system: the ledger is appended and synced there, under a
lock, before noise is added. The archive is updated after that. Without the private state it has
only the publishable files; with it, a run can be continued from the archive.

    claims/00000001-TOKEN        who writes here; the highest number owns the prefix
    00000001/manifest.json       written last: every file's object, digest and size; the permit
    00000001/files/TOKEN/PATH    the files, each written whole under a new name

An interrupted upload leaves the previous manifest, which is complete. A new owner claims the next
number and lists the claims: an owner that sees a second claim of its own number or higher gives
way. An owner looks for higher claims after each manifest, and stops if there is one.

**What a lost folder may have released.** Its ledger recorded that, but the archived copy may be
older. So the training requests a permit: in attempt e, up to step B. Before the first of those
steps is released, a manifest stores the permit together with the ledger at that time; until then
the training waits. If the folder is lost, every step of e below B that the archived ledger lacks
is recorded as released, so epsilon is never too low, and a new attempt with a fresh nonce starts,
so that no noise is drawn twice. If the folder was not lost after all, it cannot continue: its next
permit finds the higher claim.

An export is text in a job's log. Only the release, the certificates and the report leave a cluster
this way; private/ and run.json stay, so that a fetched copy is never taken for a run that could be
continued.
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
    """Return whether a file may leave; in release/, only what `dpdist release` writes may.

    path: relative to a run folder, as `dpdist.core.files.check_relative_path` allows.
    """
    top, _, below = path.partition("/")
    return top in PUBLISHABLE and (top != "release" or is_release_file(below))


def publishable_files(folder: RunFolder) -> list[Path]:
    """Return the sorted files that may leave, relative to the run folder.

    Targets of links and released weights without their card are left out.
    """
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
    """Return the publishable files as printable text that ends with a digest.

    Raises UserError above `limit` bytes, and if there is no such run.
    """
    folder.check_format()
    files = publishable_files(folder)
    total = sum((folder.path / path).stat().st_size for path in files)
    if total > limit:
        raise UserError(
            f"{folder.path}: must be at most {limit / 2**20:.0f} MiB to fit in a job's log, got "
            f"{total / 2**20:.0f} MiB; copy it from the shared storage"
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
    """Write the files exported in a job's log under `target`, and return their paths.

    Raises UserError, before anything is written, if the text is incomplete or changed, or names a
    file that must not be in an export.
    """
    try:
        body, _, tail = log.partition(_BEGIN)[2].partition(_END)
        raw = base64.b64decode("".join(body.split()), validate=True)
    except ValueError as error:
        raise UserError(f"the export in the job's log is damaged: {error}") from error
    digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
    if not tail.startswith(f"{digest}-----"):
        raise UserError("the job's log contains no complete export")
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as archive,
            staging_folder(target) as aside,
        ):
            names = archive.getnames()
            for name in names:
                if not is_publishable(check_relative_path(name)):
                    raise ValueError(f"{name!r} must not leave a cluster")
            archive.extractall(aside, filter="data")
    except (ValueError, OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise UserError(f"the export in the job's log cannot be used: {error}") from error
    return [target / name for name in names]


# --- names, claims, manifest and permit -------------------------------------------------------


FORMAT = 2
MANIFEST = "manifest.json"


class Permit(FileShape):
    """Permission to release the steps in [step, steps) of an attempt epoch.

    private/permit-asked.json is the requested permit, and private/permit.json the granted one.

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
        permit: The granted permit; null without one.
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
    """Return a requested or granted permit; None if there is no file."""
    try:
        return Permit.read(path)
    except MissingFileError:
        return None


def newest_manifest(store: ObjectStore) -> tuple[int, Manifest]:
    """Return the owner's number and the newest manifest. Raises UserError without a manifest."""
    numbers = sorted({claim_number(claim) for claim in store.list_names("claims")}, reverse=True)
    if not numbers:
        raise UserError(f"{store.url}: is not the archive of a run")
    for number in numbers:
        name = f"{claim_folder(number)}/{MANIFEST}"
        try:
            raw = store.get(name)
        except ObjectNotFoundError:
            continue  # its owner never finished an upload, and so never released anything
        return number, decode_manifest(raw, f"{store.url}: {name}", number)
    raise UserError(
        f"{store.url}: no upload was finished (no manifest), so nothing can be restored"
    )


def claim_folder(number: int) -> str:
    return f"{number:08d}"


def make_claim(number: int) -> str:
    return f"{claim_folder(number)}-{secrets.token_hex(8)}"


def claim_number(claim: str) -> int:
    """Return the number of a claim. Raises UserError for an object that is not a claim."""
    number = claim.partition("-")[0]
    if not (number.isascii() and number.isdigit() and len(number) <= 16):
        raise UserError(f"claims/{claim!r}: is not a claim of an archive; remove it")
    return int(number)


def encode_manifest(body: dict[str, Any]) -> bytes:
    """Return the stored bytes of a manifest."""
    return json.dumps(body, sort_keys=True, allow_nan=False).encode()


def decode_manifest(raw: bytes, context: str, number: int) -> Manifest:
    """Return the manifest that `encode_manifest` stored, with every name in it checked.

    Raises UserError if it is damaged, of a newer version, or names a file outside the run folder or
    an object outside the owner's prefix.
    """
    manifest = Manifest.parse(parse_json(raw, context), context)
    try:
        begin = f"{claim_folder(number)}/files/"
        for path, entry in manifest.files.items():
            check_relative_path(path, "files")
            if not check_relative_path(entry.object, path).startswith(begin):
                raise ValueError(f"{path}: its object must be in {begin}")
    except ValueError as error:
        raise UserError(f"{context}: is damaged: {error}") from error
    return manifest


# --- the owner of an archive ------------------------------------------------------------------


_CHECKPOINT_FILES = ("done.json", "state.safetensors")
_RETRY_SECONDS = 600.0  # for an archive that cannot be written
_CHECKPOINTS_FOLDER = "private/checkpoints/"
_LEDGER, _ANCHOR = "private/ledger.jsonl", "private/ledger.anchor"
# Files in private/ that a continued run does not need, or must create itself.
_NOT_ARCHIVED = {
    "ray", "ray.log", "errors.txt", "failure.json", "progress.json", "archive.json",
    "permit.json", "permit-asked.json", "stop-asked", "interrupted.json", "checkpoints",
    "ledger.jsonl", "ledger.anchor",
}  # fmt: skip


class Archive:
    """The archive that a run folder owns; `claim` and `find` open it."""

    def __init__(self, folder: RunFolder, record: dict[str, Any]) -> None:
        self.folder, self.private = folder, record["private"]
        self.store = ObjectStore(record["url"])
        self._number, self._claim = record["number"], record["claim"]
        self._files: dict[str, StoredFile] | None = None  # not read yet: an earlier process's
        self._stamps: dict[str, tuple[int, int, int]] = {}
        self._checkpoint = ""

    @classmethod
    def find(cls, folder: RunFolder) -> Archive | None:
        """Return the archive that this run folder owns; None without an archive."""
        return cls(folder, _read_archive_record(folder)) if folder.archive.exists() else None

    @classmethod
    def check_unclaimed(cls, folder: RunFolder, url: str | None) -> None:
        """Raise UserError if a run that is not archived yet cannot use this address."""
        if url is None or folder.archive.exists():
            return
        store = ObjectStore(url)
        if store.list_names("claims"):
            raise UserError(
                f"{store.url}: already contains the archive of a run. Give each run its own "
                "prefix; if that run's folder is lost, restore it with `dpdist cluster fetch "
                f"--restore {store.url}`"
            )

    @classmethod
    def claim(cls, folder: RunFolder, url: str | None, private: bool) -> Archive | None:
        """Return the archive of a run at its start; None if url is None.

        Raises UserError if the prefix belongs to a different run, this run is archived elsewhere or
        was taken over, or private state would be public; ClusterError if the store does not answer.
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
                "and archive_private unchanged. Remove "
                f"{folder.archive} only if that archive is permanently deleted",
                see="how-to/cluster.md#an-archive-in-an-object-store",
            )
        if private and not about["private"]:
            write_json(folder.archive, {**about, "private": True})
        archive = cls(folder, _read_archive_record(folder))
        try:
            archive._take_ownership()
        except (ClusterError, UserError):
            if not bound:  # nothing was sent, so the run stays unbound; of two rivals both give way
                with suppress(ClusterError):
                    archive.store.delete(f"claims/{archive._claim}")
                folder.archive.unlink()
            raise
        return archive

    def _take_ownership(self) -> None:
        """Write the claim if the store has none, and check that it is the highest."""
        if not self.store.list_names("claims"):
            self.store.put(f"claims/{self._claim}", json.dumps({"run": self.folder.name}).encode())
        self._check_claim()
        if self.private and self.store.is_public(f"claims/{self._claim}"):
            raise UserError(
                f"{self.store.url}: must not be readable without credentials: the private state "
                "contains the run key, which removes the noise. Close the bucket, or leave "
                "archive_private out",
                see="how-to/cluster.md#an-archive-in-an-object-store",
            )

    def _check_claim(self) -> None:
        claims = self.store.list_names("claims")
        if self._claim not in claims or any(
            claim_number(claim) >= self._number for claim in claims if claim != self._claim
        ):
            raise UserError(
                f"{self.store.url}: a different run folder claimed this prefix: the run was "
                f"restored elsewhere, or two runs use the same prefix. {self.folder.path} cannot "
                "continue; continue the other folder, or start a new run with its own prefix",
                see="how-to/cluster.md#an-archive-in-an-object-store",
            )

    @property
    def notice(self) -> str:
        """Return the text that is printed before anything is sent."""
        if not self.private:
            return f"archive: {self.store.url} receives publishable files only, no private state"
        return (
            f"archive: {self.store.url} also receives the PRIVATE state: run key, ledger and "
            "checkpoints. Anyone who can read it can remove the noise: restrict its access like "
            "that of the run folder"
        )

    # --- writing

    def update(self) -> Permit | None:
        """Bring the archive up to date, and return the permit that it now contains.

        Raises UserError if a different folder has claimed the prefix, and ClusterError if the store
        cannot be written; the archive is then unchanged.
        """
        permit = read_permit(self.folder.permit_request) if self.private else None
        first = self._files is None
        before = self._stored_files() if self._files is None else self._files
        # The checkpoint is chosen before the ledger is read: the ledger then covers it.
        chosen = self._paths_to_archive()
        files, stamps = self._upload_changes(chosen, before)
        checkpoint = _complete_checkpoint(files, chosen)
        if not checkpoint:  # replaced while it was sent; the ledger covers the previous one too
            checkpoint = _complete_checkpoint(before)
            files |= {p: kept for p, kept in before.items() if p.startswith(_CHECKPOINTS_FOLDER)}
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
        # After the manifest: a new owner that this check misses will read this manifest.
        self._check_claim()
        kept = {entry.object for entry in files.values()}
        for entry in before.values():
            if entry.object not in kept:
                self.store.delete(entry.object)
        if first:  # files of earlier owners are not read again
            for number in range(1, self._number):
                self.store.delete_folder(claim_folder(number))
        return permit

    def _upload_changes(
        self, paths: list[str], previous: dict[str, StoredFile]
    ) -> tuple[dict[str, StoredFile], dict[str, tuple[int, int, int]]]:
        """Upload what changed, and return entry and stamp by path, of the ledger and `paths`."""
        files: dict[str, StoredFile] = {}
        stamps: dict[str, tuple[int, int, int]] = {}
        if self.private and self.folder.ledger.exists():
            # The anchor first: lines that are written meanwhile come after it.
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
                continue  # replaced meanwhile; the next update uploads the new file
        return files, stamps

    def _stored_files(self) -> dict[str, StoredFile]:
        """Return the files in the manifest of an earlier process of this owner, if any."""
        name = f"{claim_folder(self._number)}/{MANIFEST}"
        try:
            raw = self.store.get(name)
        except ObjectNotFoundError:
            return {}
        return decode_manifest(raw, f"{self.store.url}: {name}", self._number).files

    def _paths_to_archive(self) -> list[str]:
        """Return the paths of the files to keep, relative to the run folder, without the ledger."""
        publishable = [path.as_posix() for path in publishable_files(self.folder)]
        if not self.private:
            return publishable
        root, growing = self.folder.path, (self.folder.metrics, self.folder.worker_groups)
        # Omitted folders are not listed either, since checkpoints appear and vanish meanwhile.
        kept = [top for top in self.folder.private.iterdir() if top.name not in _NOT_ARCHIVED]
        private = sorted(
            path
            for top in kept
            if not top.is_symlink()  # which could lead out of the run
            for path in (top.rglob("*") if top.is_dir() else [top])
            if path.is_file()
            and not path.is_symlink()
            and not path.name.startswith(".")
            and (path not in growing or self.folder.training_summary.exists())
        )
        newest = complete_checkpoints(self.folder.checkpoints)[-1:]
        private += [file for step in newest for file in sorted(step.iterdir())]
        return [*publishable, "run.json", *(path.relative_to(root).as_posix() for path in private)]

    def _upload(self, path: str, source: bytes | Path) -> StoredFile:
        name = f"{claim_folder(self._number)}/files/{secrets.token_hex(8)}/{path}"
        digest, size = self.store.put(name, source)
        return StoredFile(object=name, digest=digest, size=size)

    # --- during a training

    def make_updater(self, log: Callable[[str], None]) -> Callable[[], None]:
        """Return a function to call repeatedly during training.

        It grants permits and copies new checkpoints. If the store fails, it retries for ten
        minutes, and then raises ClusterError.
        """
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
                        f"{error}; the training stopped, since the archive must record a step "
                        "before its release. Repeat the command to continue"
                    ) from error
                next_try = now + 5.0
                return
            failing_since = None
            if permit is not None:
                write_json(self.folder.permit, permit.model_dump())

        return poll


def _complete_checkpoint(files: dict[str, Any], expected_paths: Sequence[str] = ()) -> str:
    """Return the name of the checkpoint in `files`; "" after removing an incomplete one.

    expected_paths: files that it must contain in addition to those of every checkpoint.
    """
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
    """Return address and claim of a run's archive. Raises UserError."""
    about = ArchiveRecord.read_keys(folder.archive)
    if claim_number(about["claim"]) != about["number"]:
        raise UserError(f"{folder.archive}: is damaged: its claim is {quoted(about['claim'])}")
    return about


# --- restoring and fetching -------------------------------------------------------------------


def is_archive_url(run: str) -> bool:
    """Return whether a run is given by the address of its archive."""
    return "://" in run


def open_run_or_archive(run: str, runs: Path) -> RunFolder:
    """Return the run folder by path or name, or a copy under `runs` of a finished run's archive.

    Raises UserError if there is no such run, and ClusterError if the store does not answer.
    """
    return open_archived_copy(run, runs) if is_archive_url(run) else open_run(run, runs)


def restore(url: str, runs: Path) -> tuple[RunFolder, int]:
    """Restore a lost run folder and take over its archive.

    Returns:
        The folder, and the number of steps counted in epsilon that the lost one may have released.

    Raises:
        UserError: the archive is incomplete, damaged, or without private state. No folder is left.
        ClusterError: the store does not answer. No folder is left.
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
            raise UserError(f"{store.url}: another process is restoring this archive")
        # only after the claim, which ends the old owner's permits
        _, manifest = newest_manifest(store)
        with _build_run_folder(folder) as aside:
            _download(store, manifest, aside)
            charged = _charge_possible_releases(aside, manifest)
            write_json(aside.archive, about)
    except BaseException:
        store.delete(f"claims/{about['claim']}")  # so that the old owner may continue
        raise
    return folder, charged


def open_archived_copy(url: str, runs: Path) -> RunFolder:
    """Return a copy of a finished run, to certify and report on; its archive is not changed.

    An existing copy is opened again. Raises as `restore`, and UserError for an unfinished run.
    """
    store = ObjectStore(url)
    _, manifest = _newest_private_manifest(store)
    if not manifest.trained:
        raise UserError(
            f"{store.url}: this run has not finished training; if its folder is lost, restore it "
            f"with `dpdist cluster fetch --restore {store.url}`, and continue it"
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
    """Copy the publishable files of an archived run into a folder of its name under `into`.

    Returns:
        The folder, and the sorted paths in it.
    """
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
            f"{store.url}: has no private state (archive_private was not set), only publishable "
            f"files; copy them, with the report, by `dpdist cluster fetch {store.url}`"
        )
    return number, manifest


def _check_absent(folder: RunFolder) -> RunFolder:
    if folder.path.exists():
        raise UserError(f"{folder.path}: already exists; choose a different folder")
    return folder


@contextmanager
def _build_run_folder(folder: RunFolder) -> Iterator[RunFolder]:
    """Yield a temporary run folder that is moved to its place when it is complete."""
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
        digest, size = store.download(entry.object, target, entry.size)
    except ObjectNotFoundError as error:
        raise UserError(
            f"{store.url}: {path} is in the manifest but missing; if a run was still writing "
            "there, try again"
        ) from error
    if (digest, size) != (entry.digest, entry.size):
        raise UserError(
            f"{store.url}: {path} must be the archived file of {entry.size} bytes, got "
            f"{'more' if size > entry.size else size} bytes or a change: the archive is damaged"
        )


def _charge_possible_releases(folder: RunFolder, manifest: Manifest) -> int:
    """Record the releases that the archived ledger may lack, and start a new attempt.

    Returns the number of recorded steps. Raises UserError if the ledger is incomplete.
    """
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
                    raise UserError("the permit covers more steps than the plan has")
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
