"""The publishable files of a run as text: how a report comes home through a job's log.

Only what release/, the certificates and the report say leaves a cluster this way; private/ and
run.json stay, so that a fetched copy is never taken for a run that could be continued.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from pathlib import Path, PurePosixPath

from dpdist.errors import UserError
from dpdist.runfolder import RunFolder

PUBLISHABLE = (
    "recipe.yaml", "evaluation.json", "landscape.json", "release", "certificates", "attacks",
    "audit", "report",
)  # fmt: skip
MAX_BYTES = 200 * 2**20
_BEGIN, _END = "-----BEGIN DPDIST EXPORT-----", "-----END DPDIST EXPORT "
_LINE = 4096


def publishable(folder: RunFolder) -> list[Path]:
    """The files that may leave, relative to the run folder, sorted. What a link leads to is left
    out."""
    found, root = [], folder.path.resolve()
    for name in PUBLISHABLE:
        place = folder.path / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            inside = path.relative_to(folder.path)
            if path.is_file() and path.resolve() == root / inside:
                found.append(inside)
    return found


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
    in an export.
    """
    try:
        body, _, tail = log.partition(_BEGIN)[2].partition(_END)
        raw = base64.b64decode("".join(body.split()), validate=True)
    except ValueError as error:
        raise UserError(f"the job's log holds a damaged export: {error}") from error
    digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
    if not tail.startswith(f"{digest}-----"):
        raise UserError("the job's log holds no complete export")
    written = []
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            safe = member.isfile() and not path.is_absolute() and ".." not in path.parts
            if not safe or path.parts[0] not in PUBLISHABLE:
                raise UserError(f"the export names {member.name!r}, which may not leave a cluster")
            content = archive.extractfile(member)
            assert content is not None
            place = target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content.read())
            written.append(place)
    return written
