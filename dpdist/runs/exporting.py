"""The publishable files of a run as text: how a report comes home through a job's log.

Only what release/, the certificates and the report say leaves a cluster this way; private/ and
run.json stay, so that a fetched copy is never taken for a run that could be continued.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import tarfile
import zlib
from pathlib import Path

from dpdist.base.errors import UserError
from dpdist.base.names import check_paths
from dpdist.base.storage import moved_in, write_atomic
from dpdist.release.files import RELEASED, is_released
from dpdist.runs.folder import RunFolder

PUBLISHABLE = (
    "recipe.yaml", "evaluation.json", "release", "certificates", "attacks", "audit", "report",
)  # fmt: skip
MAX_BYTES = 200 * 2**20
_BEGIN, _END = "-----BEGIN DPDIST EXPORT-----", "-----END DPDIST EXPORT "
_LINE = 4096


def is_publishable(path: str) -> bool:
    """Whether a file of this path (as in `dpdist.base.names.check_path`) below a run folder may
    leave; of release/ only what `dpdist release` writes."""
    top, _, below = path.partition("/")
    return top in PUBLISHABLE and (top != "release" or is_released(below))


def publishable(folder: RunFolder) -> list[Path]:
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
    whole = all(Path("release", name) in found for name in RELEASED)
    return [path for path in found if whole or path.parts[0] != "release"]


def export(folder: RunFolder, limit: int = MAX_BYTES) -> str:
    """The publishable files as printable text, ended by a digest. Raises UserError above `limit`
    bytes, and when there is no such run."""
    folder.check_format()
    files = publishable(folder)
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


def unpack(log: str, target: Path) -> list[Path]:
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
        contents = _contents(raw)
        with moved_in(target) as aside:
            for path, content in contents.items():
                write_atomic(aside / path, content)
    except (ValueError, OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise UserError(f"the job's log holds an export that cannot be used: {error}") from error
    return [target / path for path in contents]


def _contents(raw: bytes) -> dict[str, bytes]:
    """The files of an export. Raises ValueError for one that may not be there."""
    with gzip.open(io.BytesIO(raw)) as file:
        plain = file.read(2 * MAX_BYTES + 1)
    if len(plain) > 2 * MAX_BYTES:
        raise ValueError(f"it is larger than {2 * MAX_BYTES / 2**20:.0f} MiB")
    contents: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
        members = archive.getmembers()
        for path, member in zip(check_paths(m.name for m in members), members, strict=True):
            if not member.isreg() or member.issparse() or not is_publishable(path):
                raise ValueError(f"it names {path!r}, which may not leave a cluster")
            content = archive.extractfile(member)
            assert content is not None
            contents[path] = content.read()
    return contents
